"""What the private PostgreSQL raises."""

from __future__ import annotations

from queen_trio.errors import QueenError


class EmbeddedError(QueenError):
    """The private PostgreSQL can't be started or kept running; ends the broker.

    The message is for the operator: it says what was found, and which setting or file to look at.
    """
