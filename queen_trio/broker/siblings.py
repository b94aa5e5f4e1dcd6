"""The other workers on this host, of whom one may be asked what all of them count."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")


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


async def ask_all(
    siblings: Siblings, topic: Topic, own: T, decode: Callable[[bytes], T]
) -> tuple[dict[int, T], list[int]]:
    """What each worker says, this one included, by its number; and which ones don't answer."""
    answers = await siblings.ask(topic)
    workers = {index: decode(answer) for index, answer in answers.items() if answer}
    workers[siblings.index] = own
    missing = sorted(index for index, answer in answers.items() if not answer)
    return dict(sorted(workers.items())), missing
