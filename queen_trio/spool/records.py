"""The spool's file format, without I/O: length-prefixed, checksummed records, one after another.

    magic "QTS1" | u32 body length | u32 messages | u32 CRC of the body | u32 CRC of these 16 bytes
    body: a MessagePack array [queue, partition, [message object, ...]]

Integers are big-endian, checksums CRC-32. The header has a checksum of its own, so that a record
whose end is missing (a crash while it was written) is told from one whose bytes have changed; after
the latter the next header is searched for. It can't be found inside a message: a header has zero
bytes, JSON text has none.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple
from zlib import crc32

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

MAGIC: Final = b"QTS1"
_HEADER: Final = struct.Struct(">4sIIII")
_CHECKED: Final = _HEADER.size - 4  # what the header's own checksum covers
HEADER_BYTES: Final = _HEADER.size


class SpoolRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one push brought for one partition; it is committed together.

    `messages` are message objects as a segment holds them, with their ids; sealed (see
    model/encryption.py) where the broker that wrote them had a key.
    """

    queue: str
    partition: str
    messages: tuple[bytes, ...]


class Header(NamedTuple):
    """What stands before a body."""

    length: int
    messages: int
    checksum: int

    @property
    def end(self) -> int:
        """The size of the whole record, in bytes."""
        return HEADER_BYTES + self.length


class Damaged(NamedTuple):
    """Bytes that were a record once, or several."""

    offset: int
    data: bytes


class Torn(NamedTuple):
    """The rest of a file: a record whose end was never written."""

    offset: int
    size: int


_encode_body = msgspec.msgpack.encode
_decode_body = msgspec.msgpack.Decoder(SpoolRecord).decode


def encode(record: SpoolRecord) -> bytes:
    """Return a record as it stands in a file."""
    body = _encode_body(record)
    header = _HEADER.pack(MAGIC, len(body), len(record.messages), crc32(body), 0)[:_CHECKED]
    return b"".join((header, crc32(header).to_bytes(4, "big"), body))


def header_untrusted(data: bytes) -> Header | None:
    """Read the header that `data` starts with; None where it doesn't start with a sound one."""
    if len(data) < HEADER_BYTES:
        return None
    magic, length, messages, checksum, own = _HEADER.unpack_from(data)
    if magic != MAGIC or own != crc32(data[:_CHECKED]):
        return None
    return Header(length, messages, checksum)


def decode_untrusted(data: bytes) -> Iterator[SpoolRecord | Damaged | Torn]:
    """Decode a file; raises nothing, whatever it holds.

    Damaged bytes are skipped up to the next sound header. `Torn` comes last if it comes.
    """
    offset = 0
    while offset < len(data):
        header = header_untrusted(data[offset : offset + HEADER_BYTES])
        if header is None:
            end = _next_header(data, offset + 1)
            if end == len(data) and _is_torn(data[offset:]):
                yield Torn(offset, len(data) - offset)
            else:
                yield Damaged(offset, data[offset:end])
            offset = end
            continue
        end = offset + header.end
        if end > len(data):
            yield Torn(offset, len(data) - offset)
            return
        body = data[offset + HEADER_BYTES : end]
        record = _body_untrusted(header, body)
        yield Damaged(offset, data[offset:end]) if record is None else record
        offset = end


def _body_untrusted(header: Header, body: bytes) -> SpoolRecord | None:
    if crc32(body) != header.checksum:
        return None
    try:
        return _decode_body(body)
    except msgspec.DecodeError:
        return None


def _next_header(data: bytes, start: int) -> int:
    """Where the next sound header is; the end of the data if there is none."""
    while (start := data.find(MAGIC, start)) >= 0:
        if header_untrusted(data[start : start + HEADER_BYTES]) is not None:
            return start
        start += 1
    return len(data)


def _is_torn(rest: bytes) -> bool:
    """Whether this is the beginning of a header, or zeros: the file grew, its data never came."""
    return not rest.strip(b"\0") or (len(rest) < HEADER_BYTES and MAGIC.startswith(rest[:4]))
