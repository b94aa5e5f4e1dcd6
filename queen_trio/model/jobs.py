"""What a background job tells about itself: a value for metrics, nothing acts on it."""

from __future__ import annotations

from attrs import frozen


@frozen
class JobStatistics:
    """Iterations since the boot, and those that ended in an error."""

    name: str
    runs: int
    failures: int
