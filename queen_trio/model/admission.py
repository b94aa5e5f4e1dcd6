"""Lanes of the admission arbiter: who writes, and who goes first when there isn't room for all."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Mapping


class Lane(Enum):
    """A kind of write transaction, its share of the budget, and its turn in waking (spec 4).

    Acks come first: they end work that already holds leases. A statement that writes segments is in
    the push lane whatever else it does (a transaction, a cycle of a stream, the replay of a dead
    letter); what gives a lease back or prolongs it is in the ack lane.
    """

    ACK = 0.30
    POP = 0.40
    PUSH = 0.25
    MAINT = 0.05

    # By identity: an Enum's own hash is a Python call, and these are keys on the hot path.
    __hash__ = object.__hash__

    @property
    def label(self) -> str:
        """The lane's name in metrics."""
        return self.name.lower()


@frozen
class LaneStatistics:
    """One lane now, and since the boot (`*_total`)."""

    inflight: int
    waiting: int
    admitted_total: int
    waited_total: int
    """How many of the admitted had to wait."""
    wait_seconds_total: float


@frozen
class AdmissionStatistics:
    """The budget with its band, what the sensor saw in the last tick, and the lanes."""

    budget: int
    lo: int
    hi: int
    trains_per_second: float
    transactions_per_train: float
    cycle_seconds: float
    """Smoothed time between two WAL flushes under load; 0 before two were seen."""
    lanes: Mapping[Lane, LaneStatistics]
