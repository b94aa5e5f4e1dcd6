"""Hints as frames: gathered for a moment and sent to every peer, and applied where they arrive."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

import structlog
import trio
from attrs import define, field

from queen_protocol import (
    HotlistDirtyBatch,
    HotlistMark,
    LocalProtocolError,
    MaintenanceModeSet,
    Message,
    MessageAvailable,
    MessageAvailableBatch,
    PopMaintenanceModeSet,
    QueueConfigDelete,
    QueueConfigSet,
    UnknownFrame,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from queen_trio.broker.hints import Hints
    from queen_trio.broker.segment import Key

    from .peer import Peer

log = structlog.get_logger(__name__)

# Wakes that come closer than this travel together; the first one leaves at once.
TICK_SECONDS: Final = 0.005
# One frame stays far below the 16 MiB that a peer accepts: names may be 512 bytes long.
BATCH_ITEMS: Final = 1_000
# More distinct wakes than this within one tick are dropped: every peer re-probes anyway.
GATHER_ITEMS: Final = 20_000


@define(eq=False)
class MeshHints:
    """Sends hints to the peers; implements `broker.hints.Hints`."""

    peers: Sequence[Peer]
    tenant: str
    _messages: dict[Key, None] = field(factory=dict)
    _marks: dict[tuple[Key, str], None] = field(factory=dict)
    _gathered: trio.Event = field(factory=trio.Event)
    _flush_at: float = -inf

    def messages_available(self, keys: Iterable[Key]) -> None:
        if self._worthwhile():
            self._messages.update(dict.fromkeys(keys))
            self._flush_soon()

    def claims_available(self, keys: Iterable[Key], group: str) -> None:
        if self._worthwhile():
            keys = tuple(keys)
            self._marks.update(dict.fromkeys((key, group) for key in keys))
            self._messages.update(dict.fromkeys(keys))
            self._flush_soon()

    def leases_ended(self, keys: Iterable[Key], group: str) -> None:
        if self._worthwhile():
            self._marks.update(dict.fromkeys((key, group) for key in keys))
            self._flush_soon()

    def queue_changed(self, queue: str) -> None:
        self._send(QueueConfigSet(queue, self.tenant))

    def queue_deleted(self, queue: str) -> None:
        self._send(QueueConfigDelete(queue, self.tenant))

    def maintenance_set(self, enabled: bool) -> None:
        self._send(MaintenanceModeSet(enabled))

    def pop_maintenance_set(self, enabled: bool) -> None:
        self._send(PopMaintenanceModeSet(enabled))

    async def serve(self) -> None:
        """Send what was gathered, a tick apart, until cancelled."""
        while True:
            await self._gathered.wait()
            self._gathered = trio.Event()
            await trio.sleep_until(self._flush_at)
            self._flush()

    def _flush_soon(self) -> None:
        if trio.current_time() >= self._flush_at:
            self._flush()
        else:
            self._gathered.set()

    def _worthwhile(self) -> bool:
        """Whether to gather it: a peer that is down gets nothing, not even later."""
        if (
            any(peer.connected for peer in self.peers)
            and len(self._messages) + len(self._marks) < GATHER_ITEMS
        ):
            return True
        self._count_dropped()
        return False

    def _flush(self) -> None:
        self._flush_at = trio.current_time() + TICK_SECONDS
        # Marks first: a wake makes its receiver look at what they name.
        pending, self._marks = list(self._marks), {}
        for start in range(0, len(pending), BATCH_ITEMS):
            marks = tuple(
                HotlistMark(queue, part, self.tenant, group)
                for (queue, part), group in pending[start : start + BATCH_ITEMS]
            )
            self._send(HotlistDirtyBatch(marks))
        messages, self._messages = list(self._messages), {}
        for start in range(0, len(messages), BATCH_ITEMS):
            batch = messages[start : start + BATCH_ITEMS]
            items = tuple(MessageAvailable(queue, part, self.tenant) for queue, part in batch)
            self._send(items[0] if len(items) == 1 else MessageAvailableBatch(items))

    def _send(self, message: Message) -> None:
        try:
            frame = encode(message)
        except LocalProtocolError as error:  # a name that the wire can't carry: its wake is late
            log.debug("hint not sent", error=str(error))
            self._count_dropped()
            return
        for peer in self.peers:
            if not peer.is_self:
                peer.send_nowait(frame)

    def _count_dropped(self) -> None:
        for peer in self.peers:
            peer.dropped += not peer.is_self


def apply(message: Message | UnknownFrame, hints: Hints, tenant: str) -> None:
    """Act on a received frame, locally: it is never passed on. Another tenant's is ignored."""
    if isinstance(message, MessageAvailable):
        if message.tenant in (None, tenant):
            hints.messages_available([(message.queue, message.partition)])
    elif isinstance(message, MessageAvailableBatch):
        hints.messages_available(
            [
                (item.queue, item.partition)
                for item in message.items
                if item.tenant in (None, tenant)
            ]
        )
    elif isinstance(message, HotlistDirtyBatch):
        for mark in message.items:
            if mark.tenant in (None, tenant):
                key = [(mark.queue, mark.partition)]
                if mark.group is None:
                    hints.messages_available(key)
                else:
                    hints.leases_ended(key, mark.group)
    elif isinstance(message, QueueConfigSet):
        if message.tenant in (None, tenant):
            hints.queue_changed(message.queue)
    elif isinstance(message, QueueConfigDelete):
        if message.tenant in (None, tenant):
            hints.queue_deleted(message.queue)
    elif isinstance(message, MaintenanceModeSet):
        hints.maintenance_set(message.enabled)
    elif isinstance(message, PopMaintenanceModeSet):
        hints.pop_maintenance_set(message.enabled)
