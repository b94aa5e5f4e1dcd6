"""UUIDv7: valid, ascending, and what a clock may do to them."""

from __future__ import annotations

import time
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from queen_trio.model.ids import ZERO_UUID, Uuid7

RANDOM = bytes(range(10))


class Clock:
    def __init__(self, *readings: int) -> None:
        self.readings = list(readings)

    def __call__(self) -> int:
        return self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]


def milliseconds(value: str) -> int:
    return UUID(value).int >> 80


def test_they_are_version_7_of_the_rfc() -> None:
    before = time.time_ns() // 1_000_000
    values = Uuid7().take(100)
    after = time.time_ns() // 1_000_000
    for value in values:
        uuid = UUID(value)
        assert str(uuid) == value
        assert (uuid.version, uuid.variant) == (7, "specified in RFC 4122")
        assert before <= milliseconds(value) <= after


def test_a_batch_is_ascending_and_unique() -> None:
    ids = Uuid7()
    values = [value for _ in range(50) for value in ids.take(40)]
    assert values == sorted(set(values))


@given(
    st.lists(st.tuples(st.integers(0, 2**48 - 2**20), st.integers(0, 5)), min_size=1, max_size=30)
)
def test_ascending_whatever_the_clock_does(steps: list[tuple[int, int]]) -> None:
    ids = Uuid7(Clock(*(reading for reading, _ in steps)))
    values = [value for _, count in steps for value in ids.take(count)]
    assert values == sorted(set(values))
    assert all(UUID(value).version == 7 for value in values)


def test_a_clock_that_steps_back_is_not_followed() -> None:
    ids = Uuid7(Clock(1000, 400, 1001))
    assert [milliseconds(value) for _ in range(3) for value in ids.take(1)] == [1000, 1000, 1001]


def test_none() -> None:
    assert Uuid7().take(0) == []


def test_a_full_counter_moves_on_to_the_next_millisecond() -> None:
    ids = Uuid7(Clock(1000), lambda n: b"\xff" * n)
    first = ids.take(1)
    ids._next = (1 << 48) - 1  # what takes 2**47 ids in one millisecond
    second = ids.take(2)
    assert first < second
    assert [milliseconds(value) for value in second] == [1001, 1001]


def test_the_start_is_random_within_a_millisecond() -> None:
    one, other = (Uuid7(Clock(1000)).take(1)[0] for _ in range(2))
    assert milliseconds(one) == milliseconds(other)
    assert one != other


def test_entropy_is_all_that_is_used() -> None:
    assert Uuid7(Clock(7), lambda n: RANDOM[:n]).take(3) == (
        Uuid7(Clock(7), lambda n: RANDOM[:n]).take(3)
    )


def test_the_zero_uuid() -> None:
    assert UUID(ZERO_UUID).int == 0
