"""A spool file may hold any bytes: reading it raises nothing, and each byte is accounted for.

The bytes are read as a file, and as the body of a record whose checksums are right.
"""

from __future__ import annotations

from zlib import crc32

import msgspec
from hypothesis import strategies as st

from queen_trio.spool import records
from queen_trio.spool.records import Damaged, SpoolRecord, Torn, decode_untrusted, encode

RECORDS = st.builds(
    SpoolRecord,
    st.text(max_size=5),
    st.text(max_size=5),
    st.lists(st.binary(max_size=20), max_size=3).map(tuple),
)
INPUTS = st.one_of(
    st.lists(st.one_of(RECORDS.map(encode), st.binary(max_size=30)), max_size=4).map(b"".join),
    RECORDS.map(msgspec.msgpack.encode),
    st.binary(max_size=60),
)


def check(data: bytes) -> None:
    account(data)
    for messages in (0, 1):
        header = records._HEADER.pack(records.MAGIC, len(data), messages, crc32(data), 0)[:-4]
        account(header + crc32(header).to_bytes(4, "big") + data)


def account(data: bytes) -> None:
    offset = 0
    read = list(decode_untrusted(data))
    for number, one in enumerate(read):
        if isinstance(one, SpoolRecord):
            [again] = decode_untrusted(encode(one))
            assert again == one
            header = records.header_untrusted(data[offset:])
            assert header is not None
            offset += header.end
        elif isinstance(one, Damaged):
            assert one.data
            assert one.data == data[offset : offset + len(one.data)]
            offset += len(one.data)
        else:
            assert isinstance(one, Torn)
            assert (one.offset, one.size) == (offset, len(data) - offset)
            assert number == len(read) - 1
            offset += one.size
    assert offset == len(data)
