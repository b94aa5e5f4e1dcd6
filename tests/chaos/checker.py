"""Whether a history keeps what the broker promises; each rule is one function below.

Events are intervals: something happened between `sent` and `answered`. A rule speaks only of what
no order inside those intervals could explain, so that what it refuses is a fault for certain.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from enum import Enum
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from attrs import define, frozen

from tests.chaos.history import Ack, Claim, Extension, Kind, Place, Push, Status, Verb

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.chaos.history import History

NEVER = float("-inf")
FOREVER = float("inf")
# PostgreSQL's wall clock, which leases are measured by, against our monotonic one.
CLOCK_SECONDS = 0.05

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
    PUSH_ORDER = "what was committed first is stored first; a request keeps its order"
    BUFFERED_ORDER = "what one broker buffered first is stored first"
    UNDELIVERED = "every group gets everything"
    SKIPPED = "a group gets a partition in order and without a gap"
    ACKED_AGAIN = "what was acked doesn't come again"
    REDELIVERED = "what wasn't acked comes again only after its lease ran out or a nack"
    TWO_LEASES = "a group has one live lease in a partition"
    ATTEMPT = "a redelivery says so"


@frozen
class Violation:
    """A broken rule, and the events that show it."""

    rule: Rule
    what: str

    def __str__(self) -> str:
        return f"{self.rule.name}: {self.what}"


def check(history: History, stored: Mapping[Place, Sequence[str]]) -> list[Violation]:
    """Return what is wrong; `stored` has each partition's transactionIds in the log's order."""
    found: list[Violation] = []
    for rule, texts in _rules(history, stored):
        found += [Violation(rule, text) for text in texts]
    return found


def _rules(
    history: History, stored: Mapping[Place, Sequence[str]]
) -> Iterator[tuple[Rule, Iterator[str]]]:
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
            view = _View.of(history, group, place, offsets)
            yield Rule.UNDELIVERED, view.undelivered(log)
            yield Rule.SKIPPED, view.skipped()
            yield Rule.ACKED_AGAIN, view.acked_again()
            yield Rule.REDELIVERED, view.redelivered()
            yield Rule.TWO_LEASES, view.two_leases()
            yield Rule.ATTEMPT, view.unsaid_redeliveries()
    yield Rule.FALSE_ANSWER, _false_answers(history, attempts)


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


def _false_answers(
    history: History, attempts: Mapping[Place, Mapping[str, list[Push]]]
) -> Iterator[str]:
    names: dict[tuple[Place, str], set[str]] = defaultdict(set)
    for place, pushed in attempts.items():
        for transaction_id, pushes in pushed.items():
            queued = [push for push in pushes if push.status is Status.QUEUED]
            if len(queued) > 1:
                yield f"queued twice: {queued[0]} and {queued[1]}"
            for push in pushes:
                if push.status in COMMITTED and push.message_id is not None:
                    names[place, transaction_id].add(push.message_id)
                if push.status is Status.DUPLICATE:
                    assert push.answered is not None
                    until = push.answered
                    if not any(o is not push and o.sent < until for o in pushes):
                        yield f"of nothing: {push}"
    for claim in history.claims:
        for transaction_id, name in zip(claim.transaction_ids, claim.message_ids, strict=True):
            names[claim.place, transaction_id].add(name)
    for (place, transaction_id), ids in names.items():
        if len(ids) > 1:
            yield f"{transaction_id} in {place} has the message ids {sorted(ids)}"


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


# -- what one group got of one partition -----------------------------------------------------------


@define
class _Lease:
    """A claim and the earliest moments at which it can have ended."""

    claim: Claim
    first: int
    last: int
    open_until: float
    """When it can have run out or been given back: the next claim may have the same messages."""
    alive_until: float
    """The same, or completed: somebody else may have the next messages."""


def _lease(
    claim: Claim, offsets: list[int], acks: Sequence[Ack], extensions: Sequence[Extension]
) -> _Lease:
    runs_out = [claim.sent + claim.lease_seconds, *(e.sent + e.seconds for e in extensions)]
    nacked = completed = FOREVER
    for ack in acks:
        for said in ack.said:
            if said.verb is not Verb.COMPLETED:
                nacked = min(nacked, ack.sent)
            elif said.transaction_id == claim.transaction_ids[-1]:
                completed = min(completed, ack.sent)
    ends = min(max(runs_out) - CLOCK_SECONDS, nacked)
    return _Lease(claim, offsets[0], offsets[-1], ends, min(ends, completed))


@define
class _View:
    """What one group saw of one partition, with offsets; leases are in the order of receipt."""

    leases: list[_Lease]
    gaps: list[str]
    said: list[tuple[float, int]]
    """When an ack was sent, and how far it can have moved the cursor since the beginning."""
    agreed: list[tuple[float, int]]
    """When an ack was answered, and how far the cursor is at least."""
    crashes: list[tuple[float, float]]
    horizon: float
    """How long after its receipt a claim can matter to another one."""

    @classmethod
    def of(cls, history: History, group: str, place: Place, offsets: Mapping[str, int]) -> _View:
        here = (group, place)
        acks = [ack for ack in history.acks if (ack.group, ack.place) == here]
        extensions = defaultdict(list)
        for extension in history.extensions:
            extensions[extension.lease].append(extension)
        acks_of = defaultdict(list)
        for ack in acks:
            acks_of[ack.lease].append(ack)
        leases: list[_Lease] = []
        gaps: list[str] = []
        for claim in sorted(history.claims, key=lambda claim: claim.received):
            if (claim.group, claim.place) != here:
                continue
            got = [offsets[t] for t in claim.transaction_ids if t in offsets]
            if len(got) < len(claim.transaction_ids):
                gaps.append(f"not in the log: {claim}")
                continue
            if any(b != a + 1 for a, b in pairwise(got)):
                gaps.append(f"offsets {got}: {claim}")
            leases.append(_lease(claim, got, acks_of[claim.lease], extensions[claim.lease]))
        said_at = [
            (ack.sent, offsets[said.transaction_id])
            for ack in acks
            for said in ack.said
            if said.verb is not Verb.RETRY and said.transaction_id in offsets
        ]
        agreed_at = [
            (ack.answered, offsets[said.transaction_id])
            for ack in acks
            if ack.answered is not None
            for said in ack.said
            if said.verb is Verb.COMPLETED and said.success and said.transaction_id in offsets
        ]
        # An asynchronous commit, as a claim is, may be lost with the server; restarts lose nothing.
        crashes = [(b.began, b.ended) for b in history.blows if b.kind is Kind.POSTGRES_KILL]
        horizon = max((lease.open_until - lease.claim.received for lease in leases), default=0.0)
        return cls(leases, gaps, _highest(said_at), _highest(agreed_at), crashes, horizon)

    def undelivered(self, log: Sequence[str]) -> Iterator[str]:
        got = {t for lease in self.leases for t in lease.claim.transaction_ids}
        missing = [t for t in log if t not in got]
        if missing:
            yield f"{len(missing)} messages, {missing[:5]}"

    def skipped(self) -> Iterator[str]:
        yield from self.gaps
        for lease in self.leases:
            reached = _at(self.said, lease.claim.received)
            if lease.first > reached + 1:
                yield f"offset {lease.first}, the cursor at {reached} at most: {lease.claim}"

    def acked_again(self) -> Iterator[str]:
        for lease in self.leases:
            reached = _at(self.agreed, lease.claim.sent)
            if lease.first <= reached:
                yield f"offset {lease.first}, the cursor at {reached} at least: {lease.claim}"

    def redelivered(self) -> Iterator[str]:
        for one, other in self._pairs():
            if (
                one.first <= other.last
                and other.first <= one.last
                and one.claim.received < other.open_until
                and other.claim.received < one.open_until
            ):
                yield f"{other.claim} after {one.claim}"

    def two_leases(self) -> Iterator[str]:
        for one, other in self._pairs():
            if one.claim.received < other.alive_until and other.claim.received < one.alive_until:
                yield f"{other.claim} beside {one.claim}"

    def unsaid_redeliveries(self) -> Iterator[str]:
        # Attempts are counted for a batch, until one is completed: only the last claim tells.
        for one, other in pairwise(self.leases):
            if (
                other.claim.attempt < 2
                and other.first <= one.last
                and one.claim.received < other.claim.sent
                and not self._crashed(one.claim.sent, other.claim.received)
            ):
                yield f"attempt {other.claim.attempt}: {other.claim} after {one.claim}"

    def _pairs(self) -> Iterator[tuple[_Lease, _Lease]]:
        """Pairs of leases near enough to matter, without a crash that may have lost the first."""
        for at, other in enumerate(self.leases):
            for before in range(at - 1, -1, -1):
                one = self.leases[before]
                if one.claim.received + self.horizon < other.claim.received:
                    break
                since = min(one.claim.sent, other.claim.sent)
                if one.claim.lease != other.claim.lease and not self._crashed(
                    since, other.claim.received
                ):
                    yield one, other

    def _crashed(self, since: float, until: float) -> bool:
        return any(since <= ended and began <= until for began, ended in self.crashes)


def _highest(moves: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """The moments at which the highest offset so far rose."""
    rises: list[tuple[float, int]] = []
    for when, group in groupby(sorted(moves), key=lambda move: move[0]):
        offset = max(offset for _, offset in group)
        if not rises or offset > rises[-1][1]:
            rises.append((when, offset))
    return rises


def _at(rises: list[tuple[float, int]], when: float) -> int:
    """The highest offset before that moment, or -1."""
    index = bisect_left(rises, (when, -1))
    return rises[index - 1][1] if index else -1
