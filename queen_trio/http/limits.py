"""What the HTTP servers grant a client before they refuse it."""

from __future__ import annotations

import attrs

KIB = 1024
MIB = 1024 * KIB


@attrs.frozen(kw_only=True)
class HttpLimits:
    """Sizes in bytes and times in seconds; both servers take the same values.

    Times are kept by a sweep every `sweep_seconds`, so they may be late by that much.
    """

    max_body: int = 64 * MIB
    """Above it: 413, before the rest is read (spec 2)."""
    max_bodies: int = 512 * MIB
    """Bodies in memory at once, over all connections: 503. One of `max_body` always fits."""
    max_head: int = 32 * KIB
    """Request line and headers together, and trailers: 431. A JWT of a few KiB must fit."""
    max_headers: int = 100
    """Number of header fields: 431."""
    max_target: int = 8 * KIB
    """The request target: 414."""
    header_seconds: float = 10.0
    """From the first byte (or the accept) to the end of the head: 408, against slow loris."""
    body_seconds: float = 30.0
    """The longest silence within a body: 408."""
    min_body_rate: int = KIB
    """Bytes per second a body must average beyond `body_seconds`: a trickle gets its 408 too."""
    keep_alive_seconds: float = 75.0
    """Idle between two requests. Longer than the 60 s at which most balancers drop theirs."""
    write_seconds: float = 30.0
    """A client that takes not one byte of its answer for so long is dropped."""
    linger_seconds: float = 2.0
    """After a refusal, input is dropped for so long: closing at once would reset the connection,
    and the client might never read why."""
    sweep_seconds: float = 1.0
    """How often the times above are looked at."""


@attrs.define(eq=False)
class BodyBudget:
    """The bytes of bodies that all connections of a server hold."""

    limit: int
    held: int = 0

    @classmethod
    def of(cls, limits: HttpLimits) -> BodyBudget:
        """Return an unused budget."""
        return cls(max(limits.max_bodies, limits.max_body))

    def take(self, size: int) -> bool:
        """Count `size` more bytes, to be given back; False when that is too much."""
        if self.held + size > self.limit:
            return False
        self.held += size
        return True

    def give_back(self, size: int) -> None:
        """Count `size` bytes less."""
        self.held -= size
