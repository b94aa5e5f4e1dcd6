"""Whether a history keeps what the broker promises; each rule is one function below.

Events are intervals: something happened between `sent` and `answered`. A rule speaks only of what
no order inside those intervals could explain, so that what it refuses is a fault for certain.
"""

from __future__ import annotations

from collections import defaultdict
from enum import Enum
from typing import TYPE_CHECKING

from attrs import frozen

from tests.chaos.history import Kind, Letter, Outcome, Place, Push, Status, Verb
from tests.chaos.view import View

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.chaos.history import Ack, History, Transaction

NEVER = float("-inf")

COMMITTED = (Status.QUEUED, Status.DUPLICATE)
ACCEPTED = (*COMMITTED, Status.BUFFERED)
# After these a commit may have happened although its connection broke.
BREAKS_CONNECTIONS = frozenset(
    {Kind.POSTGRES_KILL, Kind.POSTGRES_RESTART, Kind.BACKENDS_TERMINATED, Kind.DATABASE_CUT}
)


class Rule(Enum):
    """What is promised."""

    LOST = "what was queued or buffered is stored"
    STORED_TWICE = "a transactionId is stored once in its partition"
    INVENTED = "only what was pushed is stored"
    FALSE_ANSWER = "queued once, duplicate only of an earlier push, always under one message id"
    NAMED_TWICE = "a message id is that of one message"
    PUSH_ORDER = "what was committed first is stored first; a request keeps its order"
    BUFFERED_ORDER = "what one broker buffered first is stored first"
    UNDELIVERED = "every group gets everything"
    SKIPPED = "a group gets a partition in order and without a gap"
    ACKED_AGAIN = "what was acked doesn't come again"
    REDELIVERED = "what wasn't acked comes again only after its lease ran out or a nack"
    TWO_LEASES = "a group has one live lease in a partition"
    ATTEMPT = "a redelivery says so"
    REPLAYED = "after a seek a group gets everything from there on again"
    ATOMIC = "a transaction happens whole or not at all"
    LETTER = "what is given up is a dead letter, until it is moved back"


@frozen
class Violation:
    """A broken rule, and the events that show it."""

    rule: Rule
    what: str

    def __str__(self) -> str:
        return f"{self.rule.name}: {self.what}"


def check(
    history: History, stored: Mapping[Place, Sequence[str]], letters: Mapping[str, Letter]
) -> list[Violation]:
    """Return what is wrong; `stored` has each partition's transactionIds in the log's order.

    `letters` are the dead letters that there are in the end.
    """
    found: list[Violation] = []
    for rule, texts in _rules(history, stored, letters):
        found += [Violation(rule, text) for text in texts]
    return found


def _rules(
    history: History, stored: Mapping[Place, Sequence[str]], letters: Mapping[str, Letter]
) -> Iterator[tuple[Rule, Iterator[str]]]:
    sets = {place: set(log) for place, log in stored.items()}
    acks = _done(history, sets)
    attempts: dict[Place, dict[str, list[Push]]] = defaultdict(lambda: defaultdict(list))
    for push in history.pushes:
        attempts[push.place][push.transaction_id].append(push)
    breaks = [(b.began, b.ended) for b in history.blows if b.kind in BREAKS_CONNECTIONS]
    for place in sorted({*attempts, *stored}):
        pushed, log = attempts[place], stored.get(place, ())
        yield Rule.LOST, _lost(pushed, log)
        yield Rule.STORED_TWICE, _stored_twice(log)
        yield Rule.INVENTED, (f"{t} in {place}" for t in log if t not in pushed)
        yield Rule.PUSH_ORDER, _push_order(pushed, log)
        yield Rule.BUFFERED_ORDER, _buffered_order(pushed, log, breaks)
        offsets = {transaction_id: offset for offset, transaction_id in enumerate(log)}
        for group in sorted(history.groups):
            view = View.of(history, acks, group, place, offsets)
            yield Rule.UNDELIVERED, view.undelivered(log)
            yield Rule.SKIPPED, view.skipped()
            yield Rule.ACKED_AGAIN, view.acked_again()
            yield Rule.REDELIVERED, view.redelivered()
            yield Rule.TWO_LEASES, view.two_leases()
            yield Rule.ATTEMPT, view.unsaid_redeliveries()
            yield Rule.REPLAYED, view.not_replayed(log)
    names = _names(history, attempts)
    yield Rule.FALSE_ANSWER, _false_answers(attempts, names)
    yield Rule.NAMED_TWICE, _named_twice(names)
    yield Rule.ATOMIC, _half_done(history, sets)
    yield Rule.LETTER, _misfiled(history, acks, sets, letters)


# -- what pushes were answered and what is stored --------------------------------------------------


def _lost(pushed: Mapping[str, list[Push]], log: Sequence[str]) -> Iterator[str]:
    there = set(log)
    for transaction_id, pushes in pushed.items():
        accepted = [push for push in pushes if push.status in ACCEPTED]
        if accepted and transaction_id not in there:
            yield str(accepted[0])


def _stored_twice(log: Sequence[str]) -> Iterator[str]:
    seen: set[str] = set()
    for offset, transaction_id in enumerate(log):
        if transaction_id in seen:
            yield f"{transaction_id}, again at offset {offset}"
        seen.add(transaction_id)


Names = dict[tuple[Place, str], set[str]]
"""The message ids that were told of a message."""


def _names(history: History, attempts: Mapping[Place, Mapping[str, list[Push]]]) -> Names:
    names: Names = defaultdict(set)
    for place, pushed in attempts.items():
        for transaction_id, pushes in pushed.items():
            for push in pushes:
                # One that is buffered may turn out to be a duplicate, unless it is the only one.
                kept = push.status is Status.BUFFERED and len(pushes) == 1
                if (kept or push.status in COMMITTED) and push.message_id is not None:
                    names[place, transaction_id].add(push.message_id)
    for claim in history.claims:
        for transaction_id, name in zip(claim.transaction_ids, claim.message_ids, strict=True):
            names[claim.place, transaction_id].add(name)
    return names


def _false_answers(
    attempts: Mapping[Place, Mapping[str, list[Push]]], names: Names
) -> Iterator[str]:
    for pushed in attempts.values():
        for pushes in pushed.values():
            queued = [push for push in pushes if push.status is Status.QUEUED]
            if len(queued) > 1:
                yield f"queued twice: {queued[0]} and {queued[1]}"
            for push in pushes:
                if push.status is Status.DUPLICATE:
                    assert push.answered is not None
                    until = push.answered
                    if not any(o is not push and o.sent < until for o in pushes):
                        yield f"of nothing: {push}"
    for (place, transaction_id), ids in names.items():
        if len(ids) > 1:
            yield f"{transaction_id} in {place} has the message ids {sorted(ids)}"


def _named_twice(names: Names) -> Iterator[str]:
    bearers: dict[str, list[tuple[Place, str]]] = defaultdict(list)
    for message, ids in names.items():
        for name in ids:
            bearers[name].append(message)
    for name, messages in bearers.items():
        if len(messages) > 1:
            yield f"{name}: {messages}"


def _push_order(pushed: Mapping[str, list[Push]], log: Sequence[str]) -> Iterator[str]:
    begun, behind = NEVER, ""  # the latest beginning of a commit so far in the log
    last: dict[int, int] = {}  # the index in its request of what was stored last
    for transaction_id in log:
        pushes = pushed.get(transaction_id)
        if not pushes:
            continue
        ends = [p.answered for p in pushes if p.status in COMMITTED and p.answered is not None]
        if ends and min(ends) < begun:
            yield f"{transaction_id} was committed by {min(ends)}, but stands behind {behind}"
        queued = [push for push in pushes if push.status is Status.QUEUED]
        start = min(push.sent for push in queued or pushes)
        if start > begun:
            begun, behind = start, f"{transaction_id}, pushed at {start}"
        for push in queued:
            if push.index < last.get(push.request, -1):
                yield f"{push} stands behind a later item of its request"
            last[push.request] = push.index


def _buffered_order(
    pushed: Mapping[str, list[Push]], log: Sequence[str], breaks: Sequence[tuple[float, float]]
) -> Iterator[str]:
    begun: dict[int, tuple[float, str]] = {}
    for transaction_id in log:
        pushes = pushed.get(transaction_id, [])
        buffered = [push for push in pushes if push.status is Status.BUFFERED]
        if not buffered:
            continue
        push = buffered[0]
        assert push.answered is not None
        before, behind = begun.get(push.broker, (NEVER, ""))
        if push.answered < before and len(pushes) == 1:
            yield f"{push} stands behind {behind}"
        # One whose commit may have happened after all, here or elsewhere, may stand further up.
        certain = len(pushes) == 1 and not any(
            push.sent <= end and began <= push.answered for began, end in breaks
        )
        if certain and push.sent > before:
            begun[push.broker] = push.sent, str(push)


# -- transactions and dead letters -----------------------------------------------------------------


def _done(history: History, log: Mapping[Place, set[str]]) -> list[Ack]:
    """The acks that may have been done: of a transaction only if anything else of it was."""
    happened = {
        attempt.number
        for attempt in history.transactions
        if any(t in log.get(place, ()) for place, t in attempt.pushed)
    }
    return [a for a in history.acks if a.transaction is None or a.transaction in happened]


def _half_done(history: History, log: Mapping[Place, set[str]]) -> Iterator[str]:
    attempts: dict[int, list[Transaction]] = defaultdict(list)
    for attempt in history.transactions:
        attempts[attempt.number].append(attempt)
    acks: dict[int | None, list[Ack]] = defaultdict(list)
    for ack in history.acks:
        acks[ack.transaction].append(ack)
    for number, tries in attempts.items():
        pushed = tries[0].pushed
        there = [t for place, t in pushed if t in log.get(place, ())]
        if there and len(there) < len(pushed):
            yield f"transaction {number} pushed {pushed}, of which only {there} is stored"
        if any(said.success is False for ack in acks[number] for said in ack.said):
            yield f"its acks were refused: {tries[-1]}"
        if there and all(attempt.outcome is Outcome.REFUSED for attempt in tries):
            yield f"refused, and stored all the same: {tries[-1]}"


def _misfiled(
    history: History,
    acks: Sequence[Ack],
    log: Mapping[Place, set[str]],
    letters: Mapping[str, Letter],
) -> Iterator[str]:
    filed, moved = set(letters.values()), set(history.moves.values())
    nacked: set[Letter] = set()
    for ack in acks:
        for said in ack.said:
            letter = Letter(ack.group, ack.place, said.transaction_id)
            if said.verb in (Verb.DLQ, Verb.FAILED):
                nacked.add(letter)
            if said.dead and letter not in filed | moved:
                yield f"said to be a dead letter, and isn't: {letter}"
    for letter in filed - nacked:
        yield f"nobody gave it up: {letter}"
    for name, letter in history.moves.items():
        if (name in letters) == (f"dlq:{name}" in log.get(letter.place, ())):
            yield f"{name} is {'still' if name in letters else 'neither'} there and moved: {letter}"
