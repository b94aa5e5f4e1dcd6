"""The dedup filter against a list of all messages: it may ask too much, never too little."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from hashlib import blake2b

from hypothesis import given, settings
from hypothesis import strategies as st

from queen_trio.broker.dedup import (
    CATCH_UP_MESSAGES,
    FIRST_CHUNK_MESSAGES,
    UNKNOWN,
    WORTHWHILE_MESSAGES,
    DedupFilter,
)
from queen_trio.store.queries import NOTHING_VERIFIED, HistoryRow

START = datetime(2026, 1, 1, tzinfo=UTC)
KEY = ("queue", "partition")
PARTITION = uuid.UUID(int=1)


def hash_of(number: int) -> bytes:
    return blake2b(str(number).encode(), digest_size=16).digest()


class Log:
    """One partition as the database has it, and the filter of one broker that pushes to it."""

    def __init__(self, budget_bytes: int = 1 << 20) -> None:
        self.filter = DedupFilter(budget_bytes)
        self.rows: list[HistoryRow] = []
        self.partition = PARTITION

    @property
    def last(self) -> int:
        return self.rows[-1].end_offset if self.rows else -1

    def append(self, numbers: list[int]) -> HistoryRow:
        row = HistoryRow(
            self.last + 1,
            self.last + len(numbers),
            START + timedelta(seconds=len(self.rows)),
            b"".join(map(hash_of, numbers)),
            START - timedelta(hours=1),
        )
        self.rows.append(row)
        return row

    def push(self, numbers: list[int], *, ours: bool = True) -> None:
        row = self.append(numbers)
        if ours:
            after = self.filter.learn(
                KEY,
                self.partition,
                row.base_offset,
                row.created_at,
                [hash_of(number) for number in numbers],
                supplied=True,
            )
            while after is not None:
                rows = [r for r in self.rows if r.base_offset > after][:3]
                after = self.filter.load(KEY, self.partition, after, rows)

    def check(self, number: int) -> None:
        verified = self.filter.verify(KEY, [hash_of(number)])
        if verified == UNKNOWN:
            return
        assert verified.since is not None
        for row in self.rows:
            if row.created_at > verified.since:
                for position, offset in enumerate(range(row.base_offset, row.end_offset + 1)):
                    if row.hashes[16 * position : 16 * position + 16] == hash_of(number):
                        assert offset > verified.upto


batches = st.lists(st.integers(0, 400), min_size=1, max_size=300)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(batches, st.booleans()), max_size=30), st.sampled_from([4_000, 1 << 20]))
def test_it_never_says_too_little(pushes: list[tuple[list[int], bool]], budget: int) -> None:
    log = Log(budget)
    for numbers, ours in pushes:
        log.push(numbers, ours=ours)
        for number in range(0, 401, 7):
            log.check(number)
        assert log.filter.statistics().bytes <= budget


def test_a_small_partition_is_not_worth_it() -> None:
    log = Log()
    log.push(list(range(WORTHWHILE_MESSAGES)))
    assert log.filter.verify(KEY, [hash_of(0)]) == UNKNOWN
    log.push([1000])
    assert log.filter.verify(KEY, [hash_of(1001)]).upto == log.last


def test_a_hit_narrows_to_its_chunk_and_a_miss_verifies_all() -> None:
    log = Log()
    log.push(list(range(FIRST_CHUNK_MESSAGES)))
    log.push(list(range(10_000, 10_100)))
    assert log.filter.verify(KEY, [hash_of(10_050)]).upto == FIRST_CHUNK_MESSAGES - 1
    assert log.filter.verify(KEY, [hash_of(5)]).upto == NOTHING_VERIFIED
    assert log.filter.verify(KEY, [hash_of(-1)]).upto == log.last


def test_pushes_of_others_are_read_once_they_are_many() -> None:
    log = Log()
    log.push(list(range(WORTHWHILE_MESSAGES)))
    log.push([-1])
    known = log.last
    log.push(list(range(5_000, 5_010)), ours=False)
    log.push([-2])
    assert log.filter.verify(KEY, [hash_of(-3)]).upto == known
    log.push(list(range(6_000, 6_000 + CATCH_UP_MESSAGES)), ours=False)
    log.push([-4])
    assert log.filter.verify(KEY, [hash_of(-3)]).upto == log.last


def test_a_partition_made_anew_is_unknown() -> None:
    log = Log()
    log.push(list(range(WORTHWHILE_MESSAGES)))
    log.push([-1])
    log.rows.clear()
    log.partition = uuid.UUID(int=2)
    log.push([7])
    assert log.filter.verify(KEY, [hash_of(-1)]) == UNKNOWN


def test_past_the_budget_the_oldest_goes_and_since_moves_up() -> None:
    log = Log(budget_bytes=300_000)
    for start in range(0, 50_000, 1_000):
        log.push(list(range(start, start + 1_000)))
    assert 200_000 < log.filter.statistics().bytes <= 300_000
    verified = log.filter.verify(KEY, [hash_of(-1)])
    assert verified.upto == log.last
    assert verified.since is not None
    assert verified.since > START


def test_a_budget_below_one_chunk_knows_nothing() -> None:
    log = Log(budget_bytes=1_000)
    log.push(list(range(WORTHWHILE_MESSAGES)))
    log.push([-1])
    assert log.filter.verify(KEY, [hash_of(-2)]) == UNKNOWN


def test_a_partition_dropped_while_its_history_is_read_stays_unknown() -> None:
    """Rows that follow a dropped part say nothing of that part."""
    log = Log()
    log.push(list(range(WORTHWHILE_MESSAGES)))
    log.push([-1])
    log.push(list(range(6_000, 6_000 + CATCH_UP_MESSAGES)), ours=False)
    row = log.append([-2])
    after = log.filter.learn(
        KEY, PARTITION, row.base_offset, row.created_at, [hash_of(-2)], supplied=True
    )
    assert after is not None
    log.filter.forget(KEY)  # as the budget does when others learn meanwhile
    log.filter.load(KEY, PARTITION, after, [r for r in log.rows if r.base_offset > after])
    log.check(0)
