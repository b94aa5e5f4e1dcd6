"""The name server of a compose network: it knows the services that run, and nobody else."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

HEADER_BYTES = 12
TYPE_A = b"\x00\x01"
CLASS_IN = b"\x00\x01"
ANSWER = b"\x81\x80"  # a response, recursion available, no error
NO_SUCH_NAME = b"\x81\x83"
TTL = b"\x00\x00\x00\x01"  # a second


def reply(query: bytes, addresses: Mapping[str, str]) -> bytes:
    """Answer one query for one name: an A record, nothing for another type, or no such name."""
    labels, position = [], HEADER_BYTES
    while size := query[position]:
        labels.append(query[position + 1 : position + 1 + size].decode("ascii"))
        position += 1 + size
    question = query[HEADER_BYTES : position + 5]
    address = addresses.get(".".join(labels).lower())
    found = address is not None and question[-4:-2] == TYPE_A
    head = query[:2] + (NO_SUCH_NAME if address is None else ANSWER) + b"\x00\x01"
    counts = (b"\x00\x01" if found else b"\x00\x00") + b"\x00\x00\x00\x00"
    record = b""
    if found and address is not None:
        data = socket.inet_aton(address)
        record = b"\xc0\x0c" + TYPE_A + CLASS_IN + TTL + b"\x00\x04" + data
    return head + counts + question + record


@contextmanager
def name_server(addresses: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Serve `addresses`, as they change, over UDP for the block's time; yields where."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))

        def serve() -> None:
            while True:
                query, client = server.recvfrom(4096)
                if not query:
                    return
                server.sendto(reply(query, addresses), client)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()
        server.sendto(b"", server.getsockname())
        thread.join(5)
