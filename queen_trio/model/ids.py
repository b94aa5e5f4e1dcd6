"""Message and lease ids: UUIDv7, monotone in the order in which one process makes them."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

# The last 48 bits count up inside a millisecond from a random start below 2**47: a million ids in
# one millisecond can't overflow them, and two processes don't meet.
_COUNTER_BITS: Final = 48

ZERO_UUID: Final = "00000000-0000-0000-0000-000000000000"


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def created_at(message_id: str) -> datetime:
    """When a UUIDv7 was made, to the millisecond, by the clock of its maker."""
    return _EPOCH + timedelta(milliseconds=int(message_id[:8] + message_id[9:13], 16))


class Uuid7:
    """Makes UUIDv7 strings in batches; each is greater than all that it made before.

    `clock` gives milliseconds since 1970, `entropy(n)` n random bytes. A clock that steps back is
    not followed until it has caught up.
    """

    def __init__(
        self,
        clock: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._clock = clock
        self._entropy = entropy
        self._millisecond = -1
        self._prefix = ""
        self._next = 1 << _COUNTER_BITS

    def take(self, count: int) -> list[str]:
        """Make `count` ids, ascending."""
        now = self._clock()
        if now > self._millisecond or self._next + count > 1 << _COUNTER_BITS:
            self._start(max(now, self._millisecond + 1))
        first = self._next
        self._next += count
        prefix = self._prefix
        return [f"{prefix}{n:012x}" for n in range(first, self._next)]

    def _start(self, millisecond: int) -> None:
        self._millisecond = millisecond
        random = int.from_bytes(self._entropy(10), "big")
        stamp = f"{millisecond:012x}"
        rand_a = random & 0xFFF
        variant = 0x8000 | (random >> 12) & 0x3FFF
        self._prefix = f"{stamp[:8]}-{stamp[8:]}-7{rand_a:03x}-{variant:04x}-"
        self._next = (random >> 26) & ((1 << _COUNTER_BITS - 1) - 1)
