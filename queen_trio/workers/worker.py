"""A worker's side of the arrangement: the sockets it inherits, and the line to its supervisor."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from typing import Final

import trio
from attrs import asdict, define, field, frozen

from .siblings import SiblingSockets

# What a worker sends to its supervisor when it serves: one byte, whatever it is.
SERVING: Final = b"+"


@frozen
class Place:
    """What the supervisor tells a worker at its start, on the command line.

    `listeners` and `leash` are descriptors that it inherits, `directory` holds the sockets by which
    the workers reach each other.
    """

    index: int
    count: int
    listeners: tuple[int, ...]
    directory: str
    leash: int = -1  # known when the process starts

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Place:
        values = json.loads(text)
        return cls(**{**values, "listeners": tuple(values["listeners"])})


@define(eq=False)
class Worker:
    """This process as one of several; make it once, it takes over the descriptors of its place."""

    place: Place
    siblings: SiblingSockets = field(init=False)
    listeners: list[socket.socket] = field(init=False)
    _leash: trio.SocketStream = field(init=False)

    def __attrs_post_init__(self) -> None:
        place = self.place
        self.siblings = SiblingSockets(place.directory, place.index, place.count)
        self.listeners = [_adopt(descriptor) for descriptor in place.listeners]
        leash = trio.socket.from_stdlib_socket(_adopt(place.leash))
        self._leash = trio.SocketStream(leash)

    async def report_serving(self) -> None:
        """Tell the supervisor that requests are being answered."""
        with suppress(trio.BrokenResourceError):  # it is gone, which `wait_released` finds
            await self._leash.send_all(SERVING)

    async def wait_released(self) -> None:
        """Block until the supervisor wants this worker to stop, or is dead.

        Nothing is ever sent this way: the kernel closes the leash however the supervisor ends.
        """
        with suppress(trio.BrokenResourceError):
            await self._leash.receive_some(1)
        self.siblings.abandoned = True


def _adopt(descriptor: int) -> socket.socket:
    os.set_inheritable(descriptor, False)
    adopted = socket.socket(fileno=descriptor)
    adopted.setblocking(False)
    return adopted
