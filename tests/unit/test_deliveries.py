"""What pops have delivered, compared with what acks say."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID, uuid4

import pytest

from queen_trio.broker.deliveries import Deliveries
from queen_trio.broker.segment import Drafted
from queen_trio.model.ids import Uuid7
from queen_trio.model.message import PushItem
from queen_trio.model.pop import Claim, ClaimedPartition, ClaimedSegment
from queen_trio.store import segments as segments_of

PART = uuid4()


def claim_of(*segments: list[str], lease: str = "lease", part: UUID = PART) -> Claim:
    claimed = []
    for ids in segments:
        # A payload that says something else of itself: only the message's own id counts.
        payload = b'{"transactionId":"other","pad":"%b"}' % (b"x" * 100)
        items = [PushItem("q", payload, "p", transaction_id) for transaction_id in ids]
        [draft] = Drafted.from_items(items, Uuid7(), None).drafts.values()
        entries = segments_of.entries(segments_of.join(draft.records))
        claimed.append(ClaimedSegment(datetime.now(UTC), entries))
    return Claim(lease, "g", [ClaimedPartition(part, "p", "q", 1, claimed)])


@pytest.mark.parametrize("ids", [["a"], ["a", "b", "c"], ['q"\\', "ü", "\x1f", "🐝", " "]])
def test_all_of_a_batch_in_its_order_completes_it_once(ids: list[str]) -> None:
    deliveries = Deliveries()
    deliveries.note(claim_of(ids))
    assert deliveries.complete("lease", PART, ids)
    assert not deliveries.complete("lease", PART, ids), "forgotten"


def test_a_batch_may_lie_in_several_segments() -> None:
    deliveries = Deliveries()
    deliveries.note(claim_of(["a", "b"], ["c"]))
    assert deliveries.complete("lease", PART, ["a", "b", "c"])


@pytest.mark.parametrize(
    "said", [[], ["a"], ["b", "a"], ["a", "x"], ["a", "b", "c"], ["a", "other"], ["a", ""]]
)
def test_anything_else_does_not(said: list[str]) -> None:
    deliveries = Deliveries()
    deliveries.note(claim_of(["a", "b"]))
    assert not deliveries.complete("lease", PART, said)


def test_lease_and_partition_tell_batches_apart() -> None:
    deliveries = Deliveries()
    deliveries.note(claim_of(["a"]))
    other = uuid4()
    deliveries.note(claim_of(["b"], part=other))
    assert not deliveries.complete("other", PART, ["a"])
    assert not deliveries.complete("lease", uuid4(), ["a"])
    assert deliveries.complete("lease", other, ["b"])
    assert deliveries.complete("lease", PART, ["a"])


def test_without_a_lease_nothing_is_kept() -> None:
    deliveries = Deliveries()
    deliveries.note(claim_of(["a"], lease=""))
    assert not deliveries.complete("", PART, ["a"])


def test_the_oldest_are_forgotten_past_the_limit() -> None:
    size = len(claim_of(["0"]).partitions[0].segments[0].entries[0])
    deliveries = Deliveries(max_bytes=2 * size)
    for n in range(3):
        deliveries.note(claim_of([str(n)], lease=f"lease {n}"))
    assert [deliveries.complete(f"lease {n}", PART, [str(n)]) for n in range(3)] == [
        False,
        True,
        True,
    ]
    deliveries.note(claim_of(["a", "b", "c"]))  # alone too large
    assert not deliveries.complete("lease", PART, ["a", "b", "c"])
    deliveries.note(claim_of(["a"]))
    assert deliveries.complete("lease", PART, ["a"]), "and the room is counted right"
