"""The segment format: an RFC 7464 JSON text sequence, zstd-compressed when that pays (spec 1).

Each message is one record: RS (0x1E), the message object as a pop will answer it, LF. 0x1E can't
occur inside JSON text, so a segment becomes a pop's answer by a `split` and a `join` at C speed,
and an operator can read one with `zstd -d | jq --seq`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import zstandard

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

RS = b"\x1e"
_BETWEEN = b"\n\x1e"
# Below this size a zstd frame saves nothing worth its 10 µs.
_COMPRESS_FROM_BYTES = 512
# Level 1: 36 µs for 35 kB; higher levels cost more CPU than the bytes they save.
_compress = zstandard.ZstdCompressor(level=1).compress
_decompress = zstandard.ZstdDecompressor().decompress

# What a reader remembers, as text; 50 segments of 100 small messages.
READER_MAX_BYTES: Final = 2 * 1024 * 1024


def join(records: Sequence[bytes]) -> bytes:
    """Make a text sequence of message objects."""
    return b"".join((RS, _BETWEEN.join(records), b"\n"))


def encode(records: Sequence[bytes]) -> tuple[bytes, int]:
    """Join message objects into a blob; returns it and its size before compression, in bytes."""
    text = join(records)
    if len(text) >= _COMPRESS_FROM_BYTES:
        blob = _compress(text)
        if len(blob) < len(text):
            return blob, len(text)
    return text, len(text)


def decode(blob: bytes) -> bytes:
    """Give back the text sequence of a blob: the first byte tells whether it is compressed."""
    return blob if blob[:1] == RS else _decompress(blob)


def entries(text: bytes) -> list[bytes]:
    """Cut a text sequence into its message objects in offset order, each without its last brace.

    A split at one byte runs at the speed of memchr; at "} LF RS" it takes twice as long.
    """
    return [entry[:-2] for entry in text.split(RS)[1:]]


def split(text: bytes) -> list[bytes]:
    """Cut a text sequence into its message objects, in offset order."""
    return [entry[:-1] for entry in text.split(RS)[1:]]


def splice(entries: Sequence[bytes], suffix: bytes) -> bytes:
    """Turn entries into comma-joined JSON objects.

    `suffix` is what each of them has yet to get: the fields that only the delivery knows, and `}`.
    """
    return (suffix + b",").join(entries) + suffix


class Reader:
    """Turns blobs into entries, and has those of the last ones at hand.

    Groups that drain one queue read each segment within a short time, one after the other.
    """

    def __init__(self, max_bytes: int = READER_MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        # The blob is compared, too: after a restore of the database a key may mean another one.
        self._read: OrderedDict[Hashable, tuple[bytes, list[bytes], int]] = OrderedDict()

    def entries(self, key: Hashable, blob: bytes) -> list[bytes]:
        """Return the entries of the segment `key` with this blob; the list must not be changed."""
        known = self._read.pop(key, None)
        if known is not None:
            self._bytes -= known[2]
        if known is None or known[0] != blob:
            text = decode(blob)
            known = blob, entries(text), len(text)
        self._read[key] = known
        self._bytes += known[2]
        while self._bytes > self._max_bytes:
            _, (_, _, size) = self._read.popitem(last=False)
            self._bytes -= size
        return known[1]
