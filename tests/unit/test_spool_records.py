"""The spool's record format: whatever becomes of a file, what is read was written."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from queen_trio.spool.records import (
    HEADER_BYTES,
    MAGIC,
    Damaged,
    SpoolRecord,
    Torn,
    decode_untrusted,
    encode,
    header_untrusted,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

RECORDS = st.builds(
    SpoolRecord,
    st.text(min_size=1, max_size=20),
    st.text(min_size=1, max_size=20),
    st.lists(st.binary(max_size=60), min_size=1, max_size=4).map(tuple),
)
FILES = st.lists(RECORDS, max_size=6)


def written(records: Iterable[SpoolRecord]) -> bytes:
    return b"".join(encode(record) for record in records)


def found(data: bytes) -> list[SpoolRecord]:
    return [one for one in decode_untrusted(data) if isinstance(one, SpoolRecord)]


@given(FILES)
def test_what_was_written_is_read(records: list[SpoolRecord]) -> None:
    assert list(decode_untrusted(written(records))) == records


@given(FILES, st.data())
def test_a_cut_file_is_a_prefix_and_a_torn_end(records: list[SpoolRecord], data: st.DataObject):  # type: ignore[no-untyped-def]
    whole = written(records)
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    ends = list(itertools.accumulate((len(encode(r)) for r in records), initial=0))
    complete = sum(end <= len(cut) for end in ends) - 1
    read = list(decode_untrusted(cut))
    assert read[:complete] == records[:complete]
    rest = len(cut) - ends[complete]
    assert read[complete:] == ([Torn(ends[complete], rest)] if rest else [])


@given(st.lists(RECORDS, min_size=1, max_size=6), st.data())
def test_a_flipped_bit_costs_the_record_that_it_is_in(
    records: list[SpoolRecord], data: st.DataObject
) -> None:
    whole = bytearray(written(records))
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    whole[bit // 8] ^= 1 << bit % 8
    ends = list(itertools.accumulate(len(encode(r)) for r in records))
    hit = next(k for k, end in enumerate(ends) if bit // 8 < end)
    read = list(decode_untrusted(bytes(whole)))
    assert [r for r in read if isinstance(r, SpoolRecord)] == records[:hit] + records[hit + 1 :]
    start = ends[hit] - len(encode(records[hit]))
    assert [r for r in read if not isinstance(r, SpoolRecord)] == [
        Damaged(start, bytes(whole[start : ends[hit]]))
    ]


@given(st.binary(max_size=200), FILES, st.binary(max_size=200))
def test_garbage_raises_nothing_and_every_byte_is_accounted_for(
    before: bytes, records: list[SpoolRecord], after: bytes
) -> None:
    whole = before + written(records) + after
    size = 0
    for one in decode_untrusted(whole):
        if isinstance(one, SpoolRecord):
            size += len(encode(one))
        else:
            assert one.offset == size
            size += one.size if isinstance(one, Torn) else len(one.data)
    assert size == len(whole)


def test_a_file_that_grew_before_its_data_came() -> None:
    """After a crash of the machine the end may be zeros."""
    record = SpoolRecord("q", "p", (b"{}",))
    assert list(decode_untrusted(encode(record) + bytes(100))) == [
        record,
        Torn(len(encode(record)), 100),
    ]


def test_a_record_inside_a_message_is_not_found() -> None:
    """A client can't smuggle one in: JSON has no zero bytes, and a header has."""
    inner = encode(SpoolRecord("victim", "p", (b'{"data":1}',)))
    assert b"\0" in inner[:HEADER_BYTES]
    forged = MAGIC + inner[4:].replace(b"\0", b" ")
    outer = bytearray(encode(SpoolRecord("q", "p", (forged,))))
    outer[HEADER_BYTES + 1] ^= 1
    assert found(bytes(outer)) == []


def test_the_header_counts_the_messages() -> None:
    data = encode(SpoolRecord("q", "p", (b"1", b"2", b"3")))
    header = header_untrusted(data)
    assert header is not None
    assert (header.messages, header.end) == (3, len(data))
