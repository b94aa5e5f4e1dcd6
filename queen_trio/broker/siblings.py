"""The other workers on this host, of whom one may be asked what all of them count."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


class Topic(StrEnum):
    """What a worker tells its siblings about itself; http/host.py says in which form."""

    PROMETHEUS = "prometheus"
    METRICS = "metrics"
    BUFFERS = "buffers"


class Siblings(Protocol):
    """The workers of `serve --workers N`, this one among them."""

    @property
    def index(self) -> int:
        """Which one this is."""

    async def ask(self, topic: Topic) -> Mapping[int, bytes | None]:
        """Return what each of the others says; None for one that doesn't answer in time."""
