"""What one group got of one partition, and what of that nothing allowed explains."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

from attrs import define, field, frozen

from tests.chaos.history import Ack, Claim, Extension, Kind, Verb

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tests.chaos.history import History, Place, Seek

FOREVER = float("inf")
# PostgreSQL's wall clock, which leases are measured by, against our monotonic one.
CLOCK_SECONDS = 0.05
# Until then a seek that nobody answered has happened, if it ever does: client, broker and
# PostgreSQL have all given up.
SEEK_SECONDS = 60.0


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


@frozen(eq=False)
class _Jump:
    """A seek: it happened at some moment of the interval, and put the cursor to `to` or lower."""

    seek: Seek
    until: float
    certain: bool
    to: int

    @property
    def sent(self) -> float:
        return self.seek.sent

    def may_follow(self, moment: float) -> bool:
        return self.until >= moment


class _Move(NamedTuple):
    """One item of an ack: when it was sent and answered, and the offset it may bring the cursor to.

    `claimed` is when the claim that it belongs to was received.
    """

    sent: float
    answered: float
    offset: int
    claimed: float


Rises = list[tuple[float, int]]
"""The moments at which the highest offset so far rose."""


@define
class View:
    """What one group saw of one partition, with offsets; leases are in the order of receipt."""

    leases: list[_Lease]
    gaps: list[str]
    said: list[_Move]
    """How far acks can have moved the cursor."""
    agreed: list[_Move]
    """How far the cursor was at least, at some moment before the answer."""
    jumps: list[_Jump]
    crashes: list[tuple[float, float]]
    horizon: float
    """How long after its receipt a claim can matter to another one."""
    _said_since: dict[_Jump | None, Rises] = field(factory=dict)
    _agreed_since: dict[float, Rises] = field(factory=dict)

    @classmethod
    def of(
        cls,
        history: History,
        acks: Iterable[Ack],
        group: str,
        place: Place,
        offsets: Mapping[str, int],
    ) -> View:
        """`acks` are those of the history that may have been done."""
        here = (group, place)
        acks = [ack for ack in acks if (ack.group, ack.place) == here]
        jumps = [
            _jump(seek, offsets)
            for seek in history.seeks
            if seek.group == group and place in seek.places
        ]
        extensions = defaultdict(list)
        for extension in history.extensions:
            extensions[extension.lease].append(extension)
        acks_of = defaultdict(list)
        for ack in acks:
            acks_of[ack.lease].append(ack)
        leases: list[_Lease] = []
        gaps: list[str] = []
        claimed: dict[str, float] = {}
        for claim in sorted(history.claims, key=lambda claim: claim.received):
            if (claim.group, claim.place) != here:
                continue
            claimed[claim.lease] = claim.received
            got = [offsets[t] for t in claim.transaction_ids if t in offsets]
            if len(got) < len(claim.transaction_ids):
                gaps.append(f"not in the log: {claim}")
                continue
            if any(b != a + 1 for a, b in pairwise(got)):
                gaps.append(f"offsets {got}: {claim}")
            leases.append(_lease(claim, got, acks_of[claim.lease], extensions[claim.lease], jumps))
        moves = [
            (said, _Move(ack.sent, _end(ack.answered), offsets[said.transaction_id],
                         claimed.get(ack.lease, FOREVER)))
            for ack in acks
            for said in ack.said
            if said.transaction_id in offsets
        ]  # fmt: skip
        return cls(
            leases,
            gaps,
            [move for said, move in moves if said.verb is not Verb.RETRY],
            [move for said, move in moves if said.verb is Verb.COMPLETED and said.success],
            jumps,
            # An asynchronous commit, as a claim is, may be lost with the server, in a crash only.
            [(b.began, b.ended) for b in history.blows if b.kind is Kind.POSTGRES_KILL],
            max((lease.open_until - lease.claim.received for lease in leases), default=0.0),
        )

    def undelivered(self, log: Sequence[str]) -> Iterator[str]:
        got = {t for lease in self.leases for t in lease.claim.transaction_ids}
        missing = [t for t in log if t not in got]
        if missing:
            yield f"{len(missing)} messages, {missing[:5]}"

    def skipped(self) -> Iterator[str]:
        yield from self.gaps
        for lease in self.leases:
            reached = self._highest_cursor(lease.claim)
            if lease.first > reached + 1:
                yield f"offset {lease.first}, the cursor at {reached} at most: {lease.claim}"

    def _highest_cursor(self, claim: Claim) -> int:
        """How far acks and seeks can have brought the cursor, since the last seek before it."""
        before = [j for j in self.jumps if j.certain and j.until < claim.sent]
        since = max(before, key=lambda jump: jump.sent, default=None)
        if since not in self._said_since:
            self._said_since[since] = _highest(
                (move.sent, move.offset)
                for move in self.said
                # A seek ends leases: nothing that was claimed before is acked after it.
                if since is None or min(move.answered, move.claimed) >= since.sent
            )
        others = [
            jump.to
            for jump in self.jumps
            if jump.sent < claim.received and (since is None or jump.may_follow(since.sent))
        ]
        return max(_at(self._said_since[since], claim.received), *others, -1)

    def acked_again(self) -> Iterator[str]:
        for lease in self.leases:
            claim = lease.claim
            untouched = max(
                (jump.until for jump in self.jumps if jump.sent < claim.received), default=-FOREVER
            )
            if untouched not in self._agreed_since:
                self._agreed_since[untouched] = _highest(
                    (move.answered, move.offset) for move in self.agreed if move.sent > untouched
                )
            reached = _at(self._agreed_since[untouched], claim.sent)
            if lease.first <= reached:
                yield f"offset {lease.first}, the cursor at {reached} at least: {claim}"

    def not_replayed(self, log: Sequence[str]) -> Iterator[str]:
        for jump in self.jumps:
            if not jump.certain:
                continue
            # Another seek may have gone further, after this one.
            reached = max(other.to for other in self.jumps if other.may_follow(jump.sent))
            after = [lease for lease in self.leases if lease.claim.received > jump.sent]
            for lease in sorted(after, key=lambda lease: lease.first):
                if lease.first > reached + 1:
                    break
                reached = max(reached, lease.last)
            if reached + 1 < len(log):
                yield f"nothing from offset {reached + 1} on came again after {jump.seek}"

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
            between = (one.claim.sent, other.claim.received)
            if (
                other.claim.attempt < 2
                and other.first <= one.last
                and one.claim.received < other.claim.sent
                and not _any_within(self.crashes, *between)
                and not _any_within([(jump.sent, jump.until) for jump in self.jumps], *between)
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
                if one.claim.lease != other.claim.lease and not _any_within(
                    self.crashes, since, other.claim.received
                ):
                    yield one, other


def _jump(seek: Seek, offsets: Mapping[str, int]) -> _Jump:
    until = seek.sent + SEEK_SECONDS if seek.answered is None else seek.answered
    # The message that it is to is stored, or claiming it was a fault: then anything may follow.
    to = -1 if seek.target is None else offsets.get(seek.target, len(offsets)) - 1
    return _Jump(seek, until, seek.answered is not None, to)


def _lease(
    claim: Claim,
    offsets: list[int],
    acks: Sequence[Ack],
    extensions: Sequence[Extension],
    jumps: Sequence[_Jump],
) -> _Lease:
    runs_out = [claim.sent + claim.lease_seconds, *(e.sent + e.seconds for e in extensions)]
    sought = min((j.sent for j in jumps if j.may_follow(claim.sent)), default=FOREVER)
    nacked = completed = FOREVER
    for ack in acks:
        for said in ack.said:
            if said.verb is not Verb.COMPLETED:
                nacked = min(nacked, ack.sent)
            elif said.transaction_id == claim.transaction_ids[-1]:
                completed = min(completed, ack.sent)
    ends = min(max(runs_out) - CLOCK_SECONDS, nacked, sought)
    return _Lease(claim, offsets[0], offsets[-1], ends, min(ends, completed))


def _end(answered: float | None) -> float:
    return FOREVER if answered is None else answered


def _any_within(intervals: Sequence[tuple[float, float]], since: float, until: float) -> bool:
    return any(since <= ended and began <= until for began, ended in intervals)


def _highest(moves: Iterable[tuple[float, int]]) -> Rises:
    rises: Rises = []
    for when, group in groupby(sorted(moves), key=lambda move: move[0]):
        offset = max(offset for _, offset in group)
        if not rises or offset > rises[-1][1]:
            rises.append((when, offset))
    return rises


def _at(rises: Rises, when: float) -> int:
    """The highest offset before that moment, or -1."""
    index = bisect_left(rises, (when, -1))
    return rises[index - 1][1] if index else -1
