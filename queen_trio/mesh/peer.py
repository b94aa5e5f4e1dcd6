"""One configured peer: its bounded queue of frames, and what is known of the link to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio
from attrs import define, field

from queen_trio.model.mesh import PeerStatistics

if TYPE_CHECKING:
    from collections.abc import Callable

# Per peer (seeds, "Loss is designed in"): a peer that is so many frames behind is not worth more.
QUEUE_FRAMES: Final = 1024


@define(eq=False)
class Peer:
    """A peer that we dial. `send_nowait` takes frames while the link is up, and drops otherwise."""

    host: str
    port: int
    connected: bool = False
    resolved_ip: str | None = None
    sent: int = 0
    dropped: int = 0
    # This entry leads back to ourselves (spec 8.29): it is not dialled again.
    is_self: bool = False
    # Writes a frame and returns what the kernel didn't take; set while the link waits for one.
    _write_nowait: Callable[[bytes], bytes] | None = None
    _send: trio.MemorySendChannel[bytes] = field(init=False)
    _receive: trio.MemoryReceiveChannel[bytes] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[bytes](QUEUE_FRAMES)

    @property
    def name(self) -> str:
        """For the log."""
        return f"{self.host}:{self.port}"

    def send_nowait(self, frame: bytes) -> None:
        """Queue a frame; drop and count it when the link is down or the peer too slow.

        A link that waits for it writes it at once: news travels before what else is to be done.
        """
        if self.connected:
            if self._write_nowait is not None:
                frame = self._write_nowait(frame)
                if not frame:
                    self.sent += 1
                    return
                self._write_nowait = None  # until the rest of it is written, the next are queued
            try:
                self._send.send_nowait(frame)
            except trio.WouldBlock:
                pass
            else:
                return
        self.dropped += 1

    async def wait_frames(
        self, limit_bytes: int, write_nowait: Callable[[bytes], bytes] | None
    ) -> list[bytes]:
        """Take queued frames of about `limit_bytes` together; wait for one if there is none.

        What comes meanwhile is passed to `write_nowait`, and only what that returns is queued: the
        rest of a frame, maybe, and so it may be when this was cancelled.
        """
        if frames := self.take_nowait(limit_bytes):
            return frames
        self._write_nowait = write_nowait
        try:
            frame = await self._receive.receive()
        finally:
            self._write_nowait = None
        return [frame, *self.take_nowait(limit_bytes)]

    def take_nowait(self, limit_bytes: int) -> list[bytes]:
        """Take queued frames of about `limit_bytes` together, maybe none."""
        frames: list[bytes] = []
        size = 0
        while size < limit_bytes:
            try:
                frame = self._receive.receive_nowait()
            except trio.WouldBlock:
                break
            frames.append(frame)
            size += len(frame)
        return frames

    def discard_nowait(self) -> None:
        """Drop what was queued for a link that is gone: stale wakes are pointless."""
        while frames := self.take_nowait(1 << 20):
            self.dropped += len(frames)

    def statistics(self) -> PeerStatistics:
        return PeerStatistics(
            self.host, self.port, self.connected, self.resolved_ip, self.sent, self.dropped
        )
