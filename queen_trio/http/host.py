"""What this worker tells its siblings when they are asked about the whole host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from queen_trio.broker.siblings import Topic

from . import prometheus, status, system

if TYPE_CHECKING:
    from collections.abc import Callable

    from queen_trio.broker import Broker

_ANSWERS: Final[dict[Topic, Callable[[Broker], bytes]]] = {
    Topic.PROMETHEUS: prometheus.for_siblings,
    Topic.METRICS: status.for_siblings,
    Topic.BUFFERS: system.for_siblings,
}


def answer(broker: Broker, topic: Topic) -> bytes:
    """Say what this worker counts, as the handler of the same topic reads it on the other side."""
    return _ANSWERS[topic](broker)
