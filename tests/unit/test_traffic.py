"""What `Traffic` counts, without a database."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

import pytest

from queen_trio.broker.traffic import Traffic
from queen_trio.model.group import GroupState, state_of
from queen_trio.store.queries import PopRow

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def row(partition: int, queue: str, committed: int, base: int, batch_end: int) -> PopRow:
    return PopRow(UUID(int=partition), "p", queue, committed, batch_end, 1, base, NOW, b"")


def test_a_pop_counts_its_messages_by_queue() -> None:
    traffic = Traffic()
    traffic.count_popped(
        [
            row(1, "a", committed=2, base=0, batch_end=4),  # 3 and 4
            row(1, "a", committed=2, base=5, batch_end=9),
            row(2, "b", committed=-1, base=0, batch_end=0),
            # Retention has deleted 0 to 99.
            row(3, "b", committed=9, base=100, batch_end=100),
        ]
    )
    traffic.count_popped([])
    counters, _, popped = traffic.take()
    assert popped == {"a": 7, "b": 2}
    assert (counters["popped"], counters["pop_calls"], counters["empty_pops"]) == (9, 2, 1)


def test_verdicts() -> None:
    traffic = Traffic()
    traffic.count_verdicts(["ccnf", None, "drz", "alxuw"])
    counters, _, _ = traffic.take()
    assert (counters["completed"], counters["failed"], counters["dead_lettered"]) == (2, 3, 1)


def test_taken_counts_that_come_back_are_added() -> None:
    traffic = Traffic()
    traffic.count_pushed(["a", "b"], [1, 2])
    taken = traffic.take()
    traffic.count_pushed(["b"], [3])
    traffic.give_back(taken)
    counters, pushed, _ = traffic.take()
    assert (counters["pushed"], pushed) == (6, {"a": 1, "b": 5})
    counters, pushed, popped = traffic.take()
    assert (counters["pushed"], pushed, popped) == (0, {}, {})


@pytest.mark.parametrize(
    ("time_lag", "idle", "members", "state"),
    [
        (0.0, None, 0, GroupState.STABLE),
        (0.0, 1e6, 0, GroupState.STABLE),
        (299.0, 1e6, 0, GroupState.STABLE),
        (300.0, 299.0, 0, GroupState.LAGGING),
        (300.0, 300.0, 1, GroupState.LAGGING),
        (300.0, 300.0, 0, GroupState.DEAD),
        (300.0, None, 0, GroupState.DEAD),
    ],
)
def test_the_state_of_a_group(
    time_lag: float, idle: float | None, members: int, state: GroupState
) -> None:
    assert state_of(time_lag, idle, members) is state
