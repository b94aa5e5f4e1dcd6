"""How long ago something was, in milliseconds: measured when it is sent, not when it is passed."""

from __future__ import annotations

from math import ceil

import trio
from attrs import frozen


@frozen
class Elapsed:
    """A statement's parameter of type `integer`: the time since `start` (Trio's clock, s) in ms.

    psycopg turns it into an int only as it writes the statement out: after the wait for a
    connection, which may take longer than what the number is for.
    """

    start: float

    def __index__(self) -> int:
        return ceil((trio.current_time() - self.start) * 1000)

    __int__ = __index__
