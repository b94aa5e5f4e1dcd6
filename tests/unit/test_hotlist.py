"""The hot-list against a model of the database: an entry too many is fine, one too few never."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from queen_trio.broker.hotlist import SWEEP_SECONDS, Hotlist, Ring, Verdict

PARTITIONS = ("p0", "p1", "p2")
LEASE_SECONDS = 10.0


def new_ring() -> Ring:
    return Hotlist().ring("q", "g", 0.0)


class RingMachine(RuleBasedStateMachine):
    """One ring, and what is true in the database; verdicts travel before they arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.hotlist = Hotlist()
        self.ring = self.hotlist.ring("q", "g", self.now)
        self.pending = dict.fromkeys(PARTITIONS, 0)
        self.leased_until = dict.fromkeys(PARTITIONS, 0.0)
        self.asked: list[str] = []
        self.answers: dict[str, tuple[Verdict, float]] = {}

    @rule(partition=st.sampled_from(PARTITIONS))
    def push(self, partition: str) -> None:
        self.pending[partition] += 1
        self.ring.mark(partition)

    @rule(most=st.integers(1, 3))
    def take(self, most: int) -> None:
        self.asked += self.ring.take(most)

    @rule(partitions=st.lists(st.sampled_from(PARTITIONS), unique=True))
    def take_these(self, partitions: list[str]) -> None:
        """A pop asks behind a push that is on its way; its commit and its news may come later."""
        self.asked += self.ring.take_these(partitions)

    @precondition(lambda self: self.asked)
    @rule(locked=st.booleans())
    def decide(self, locked: bool) -> None:
        """The database looks at one of the candidates; the answer is under way from now on."""
        partition = self.asked.pop(0)
        if locked:
            self.answers[partition] = (Verdict.REQUEUE, inf)
        elif self.leased_until[partition] > self.now:
            self.answers[partition] = (Verdict.LEASED, self.leased_until[partition])
        elif not self.pending[partition]:
            self.answers[partition] = (Verdict.EMPTY, inf)
        else:
            self.leased_until[partition] = self.now + LEASE_SECONDS
            self.answers[partition] = (Verdict.TOOK, self.leased_until[partition])

    @precondition(lambda self: self.answers)
    @rule()
    def deliver(self) -> None:
        partition = next(iter(self.answers))
        self.ring.settle(partition, *self.answers.pop(partition))
        self.hotlist.advance(self.now)

    @rule(partition=st.sampled_from(PARTITIONS), done=st.booleans())
    def release(self, partition: str, done: bool) -> None:
        """An ack or a nack ends a lease, here or on another broker."""
        if self.leased_until[partition] > self.now:
            self.leased_until[partition] = 0.0
            if done:
                self.pending[partition] -= 1
            if self.pending[partition]:
                self.ring.promote(partition)
            else:  # also then: a later push finds the entry idle, and not deferred
                self.ring.release(partition)

    @rule(partition=st.sampled_from(PARTITIONS))
    def release_untold(self, partition: str) -> None:
        """What another broker says of a lease's end tells nothing of what is left."""
        if self.leased_until[partition] > self.now:
            self.leased_until[partition] = 0.0
            self.ring.release(partition)

    @rule(partition=st.sampled_from(PARTITIONS))
    def claim_elsewhere(self, partition: str) -> None:
        """Another broker's pop takes the lease; nobody tells us."""
        if self.pending[partition] and self.leased_until[partition] <= self.now:
            self.leased_until[partition] = self.now + LEASE_SECONDS

    @rule(seconds=st.sampled_from([1.0, LEASE_SECONDS / 2, LEASE_SECONDS]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.hotlist.advance(self.now)

    @invariant()
    def nothing_claimable_is_missing(self) -> None:
        in_flight = {*self.asked, *self.answers}
        for partition in PARTITIONS:
            if partition in in_flight or not self.pending[partition]:
                continue
            if self.leased_until[partition] <= self.now:
                assert partition in self.ring._ready or partition in self.ring._doubtful
            else:
                # It comes back by itself, at the end of the lease at the latest.
                assert (
                    partition in self.ring._ready
                    or partition in self.ring._doubtful
                    or self.ring._deferred[partition] <= self.leased_until[partition]
                )

    @invariant()
    def an_entry_is_in_one_state(self) -> None:
        ring = self.ring
        states = [*ring._ready, *ring._doubtful, *ring._deferred, *ring._in_flight]
        assert len(states) == len(set(states)) == len(self.ring)
        assert ring._told <= set(ring._deferred)


TestRingMachine = RingMachine.TestCase
TestRingMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_candidates_come_in_the_order_in_which_they_became_ready() -> None:
    ring = new_ring()
    for partition in ("b", "a", "b", "c"):
        ring.mark(partition)
    assert ring.take(2) == ["b", "a"]
    assert ring.take(9) == ["c"]


def test_what_a_lease_left_empty_comes_last_until_somebody_tells_of_messages() -> None:
    ring = new_ring()
    for partition in ("a", "b", "c"):
        ring.mark(partition)
    ring.take(3)
    for partition in ("a", "b", "c"):
        ring.settle(partition, Verdict.TOOK, until=60.0)
        ring.release(partition)
    ring.mark("d")
    ring.mark("c")
    ring.mark("c")
    assert ring.ready == len(ring) == 4
    assert ring.take(3) == ["d", "c", "a"]
    ring.release("a")  # told while a pop asks about it
    ring.settle("a", Verdict.LEASED, until=60.0)
    assert ring.take(9) == ["a", "b"]


@pytest.mark.parametrize("in_flight", [False, True])
def test_what_was_pushed_beside_the_end_of_a_lease_does_not_come_last(in_flight: bool) -> None:
    """The ack was sent before the push was committed, and says that nothing is left."""
    ring = new_ring()
    ring.mark("p")
    ring.take(1)
    if in_flight:
        ring.mark("p")
    ring.settle("p", Verdict.TOOK, until=60.0)
    if not in_flight:
        ring.mark("p")
    assert ring.release("p")
    assert ring.promising == 1
    ring.mark("other")
    assert ring.take(1) == ["p"]
    ring.settle("p", Verdict.TOOK, until=60.0)
    assert not ring.release("p"), "that was before this lease"


def test_those_that_wait_or_are_asked_about_are_not_taken_by_name() -> None:
    ring = new_ring()
    for partition in ("leased", "asked", "ready", "doubtful"):
        ring.mark(partition)
    assert ring.take(2) == ["leased", "asked"]
    ring.settle("leased", Verdict.TOOK, 10.0)
    ring.take(2)
    ring.settle("ready", Verdict.REQUEUE)
    ring.settle("doubtful", Verdict.TOOK, 10.0)
    ring.release("doubtful")
    everything = ["leased", "asked", "ready", "doubtful", "unknown"]
    assert ring.take_these(everything) == ["ready", "doubtful", "unknown"]
    assert ring.take_these(everything) == []
    assert ring.take(9) == []


def test_an_empty_answer_counts_only_if_nothing_was_heard_since() -> None:
    ring = new_ring()
    ring.mark("p")
    ring.take(1)
    ring.mark("p")
    ring.settle("p", Verdict.EMPTY)
    assert ring.take(1) == ["p"]
    ring.settle("p", Verdict.EMPTY)
    assert ring.ready == len(ring) == 0


def test_new_messages_do_not_end_a_deferral_but_a_promotion_does() -> None:
    ring = new_ring()
    ring.mark("p")
    ring.take(1)
    ring.settle("p", Verdict.LEASED, until=60.0)
    assert not ring.mark("p")
    assert ring.take(1) == []
    assert ring.promote("p")
    assert ring.take(1) == ["p"]


def test_a_promotion_under_way_beats_the_lease_that_was_seen_before() -> None:
    ring = new_ring()
    ring.mark("p")
    ring.take(1)
    ring.promote("p")
    ring.settle("p", Verdict.LEASED, until=60.0)
    assert ring.take(1) == ["p"]


def test_deadlines_make_ready_on_time() -> None:
    hotlist = Hotlist()
    ring = hotlist.ring("q", "g", 0.0)
    ring.mark("p")
    ring.take(1)
    ring.settle("p", Verdict.TOOK, until=5.0)
    assert hotlist.next_deadline == 5.0
    assert hotlist.advance(4.9) == []
    assert hotlist.advance(5.0) == [ring]
    assert hotlist.next_deadline == inf


def test_marks_reach_the_rings_of_their_queue_and_group_only() -> None:
    hotlist = Hotlist()
    rings = {(q, g): hotlist.ring(q, g, 0.0) for q in ("q", "r") for g in ("g", "h")}
    hotlist.mark("q", "p")
    hotlist.promote("q", "x", "h")
    assert {key: ring.ready for key, ring in rings.items()} == {
        ("q", "g"): 1, ("q", "h"): 2, ("r", "g"): 0, ("r", "h"): 0,
    }  # fmt: skip
    hotlist.drop("q")
    assert hotlist.statistics().rings == 2


def test_a_ring_that_grows_too_large_lets_the_database_look() -> None:
    hotlist = Hotlist(max_entries=2)
    ring = hotlist.ring("q", "g", 0.0)
    ring.seeded = True
    for partition in ("a", "b", "c"):
        hotlist.mark("q", partition)
    assert len(ring) <= 2
    assert not ring.seeded


def test_rings_that_nobody_pops_from_are_swept() -> None:
    hotlist = Hotlist()
    hotlist.ring("q", "old", 0.0)
    hotlist.ring("q", "new", 10.0)
    hotlist.sweep(SWEEP_SECONDS)
    assert hotlist.statistics().rings == 1
    hotlist.sweep(SWEEP_SECONDS + 10.0)
    assert hotlist.statistics().rings == 0


def test_what_is_unseeded_while_the_database_is_asked_stays_so() -> None:
    hotlist = Hotlist()
    ring = hotlist.ring("q", "g", 0.0)
    ring.begin_seed()
    hotlist.unseed("q")  # cursors have moved; the answer may be older
    ring.seed(["a"])
    assert not ring.seeded
    ring.begin_seed()
    ring.seed(["a"])
    assert ring.seeded


def test_a_ring_that_was_too_large_recovers() -> None:
    """While it was no guide, its entries were served without it: they must not fill it for ever."""
    ring = Hotlist(max_entries=2).ring("q", "g", 0.0)
    ring.seed([])
    for partition in ("a", "b", "c"):
        ring.mark(partition)
    assert not ring.seeded
    ring.begin_seed()
    ring.seed(["c"])
    assert ring.seeded
    assert ring.take(3) == ["c"]


def test_rings_that_have_something_are_known_without_a_walk() -> None:
    hotlist = Hotlist()
    rings = [hotlist.ring("q", f"g{n}", 0.0) for n in range(3)]
    assert hotlist.with_ready() == []
    rings[0].mark("p")
    rings[1].release("p")
    assert sorted(ring.group for ring in hotlist.with_ready()) == ["g0", "g1"]
    assert sorted(ring.group for ring in hotlist.with_ready()) == ["g0", "g1"], "as long as so"
    rings[0].take(1)
    assert hotlist.with_ready() == [rings[1]]
    rings[0].settle("p", Verdict.REQUEUE)
    assert rings[0] in hotlist.with_ready()
    hotlist.drop("q")
    assert hotlist.with_ready() == []
    assert hotlist.is_empty
