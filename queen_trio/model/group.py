"""What is known of consumer groups, and what state they are in."""

from __future__ import annotations

from enum import Enum
from typing import Final

# Consumers that keep up take messages within seconds; after five minutes they don't.
BEHIND_SECONDS: Final = 300.0
# The longest lease that a queue has by default: who claimed nothing for so long is not at work.
IDLE_SECONDS: Final = 300.0


class GroupState(Enum):
    """How a group does in a queue."""

    STABLE = "Stable"
    LAGGING = "Lagging"
    DEAD = "Dead"


def state_of(time_lag_seconds: float, idle_seconds: float | None, members: int) -> GroupState:
    """Judge a group by the age of its oldest open message and the time since its last claim.

    Behind and at work is lagging, behind and not at work is dead; a group that owes nothing old
    is stable even if nobody polls. `idle_seconds` None: it never claimed anything.
    """
    if time_lag_seconds < BEHIND_SECONDS:
        return GroupState.STABLE
    if members or (idle_seconds is not None and idle_seconds < IDLE_SECONDS):
        return GroupState.LAGGING
    return GroupState.DEAD
