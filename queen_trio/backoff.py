"""The pauses between attempts at what fails: longer and longer, and never two alike."""

from __future__ import annotations

import math
import random
from typing import Final

from attrs import define

FIRST_SECONDS: Final = 0.25


@define(eq=False)
class Backoff:
    """250 ms, doubling to `most_seconds`, each shortened by up to half at random.

    What lasted for `healthy_seconds` before it failed begins anew.
    """

    most_seconds: float
    healthy_seconds: float = math.inf
    _next: float = FIRST_SECONDS

    def seconds_after(self, lasted_seconds: float = 0.0) -> float:
        """Return the pause after an attempt that lasted so long."""
        if lasted_seconds >= self.healthy_seconds:
            self._next = FIRST_SECONDS
        seconds = self._next * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, no secret
        self._next = min(self._next * 2, self.most_seconds)
        return seconds
