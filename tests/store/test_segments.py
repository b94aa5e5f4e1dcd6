"""Segments: JSON text sequences, compressed or not, that give every byte back (spec 1)."""

from __future__ import annotations

import json

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from queen_trio.store import segments
from queen_trio.store.segments import Reader

# What a client may send as a payload: any JSON text, spacing and escapes as it likes.
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
json_texts = st.builds(
    lambda value, indent, ascii_only: json.dumps(
        value, indent=indent, ensure_ascii=ascii_only
    ).encode(errors="surrogatepass"),
    json_values,
    st.sampled_from([None, 0, 2, "\t"]),
    st.booleans(),
).filter(lambda text: b"\xed\xa0" not in text)
records = st.builds(lambda data: b'{"id":"x","data":%b}' % data, json_texts)
sequences = st.lists(records, min_size=1, max_size=6)
SUFFIX = b',"leaseId":"l"}'


def parse_rfc7464(text: bytes) -> list[bytes]:
    """Read a JSON text sequence as the RFC says, not as our code does."""
    assert text[:1] == b"\x1e"
    texts = []
    for entry in text[1:].split(b"\x1e"):
        assert entry[-1:] == b"\n"
        json.loads(entry)
        texts.append(entry[:-1])
    return texts


@given(sequences)
def test_round_trip(written: list[bytes]) -> None:
    blob, size = segments.encode(written)
    text = segments.decode(blob)
    assert size == len(text)
    assert segments.split(text) == written


@given(sequences)
def test_it_is_a_valid_json_text_sequence(written: list[bytes]) -> None:
    blob, _ = segments.encode(written)
    assert parse_rfc7464(segments.decode(blob)) == written


@given(sequences, st.data())
def test_splice_is_the_json_array_of_the_range(written: list[bytes], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(written) - 1))
    stop = data.draw(st.integers(first + 1, len(written)))
    text = segments.decode(segments.encode(written)[0])
    spliced = segments.splice(segments.entries(text)[first:stop], SUFFIX)
    assert spliced == b",".join(record[:-1] + SUFFIX for record in written[first:stop])
    assert json.loads(b"[%b]" % spliced) == [
        json.loads(record) | {"leaseId": "l"} for record in written[first:stop]
    ]


@pytest.mark.parametrize("size", [510, 511, 512, 513])
def test_only_from_512_bytes_on_it_is_compressed(size: int) -> None:
    record = b'{"data":"%b"}' % (b"x" * (size - len('\x1e{"data":""}\n')))
    blob, raw = segments.encode([record])
    assert raw == size
    assert (blob[:1] == b"\x1e") is (size < 512)
    assert segments.split(segments.decode(blob)) == [record]


def test_what_does_not_shrink_stays_plain() -> None:
    incompressible = bytes(range(0x21, 0x7F)).replace(b'"', b"").replace(b"\\", b"")
    record = b'{"data":"%b"}' % (incompressible * 5 + incompressible[::-1])
    blob, size = segments.encode([record])
    assert len(blob) <= size
    assert segments.split(segments.decode(blob)) == [record]


def test_compressed_blobs_are_zstd_frames() -> None:
    blob, size = segments.encode([b'{"data":"%b"}' % (b"x" * 10_000)])
    assert len(blob) < 100
    assert zstandard.frame_content_size(blob) == size
    assert zstandard.decompress(blob) == segments.decode(blob)


def test_a_payload_may_look_like_a_boundary() -> None:
    # A raw line feed may stand between tokens, and a `}` before it, but never a 0x1E.
    written = [b'{"data":{"a":{}\n}\n}', b'{"data":"\\n\\u001e"}']
    text = segments.decode(segments.encode(written)[0])
    assert segments.split(text) == written
    assert segments.splice(segments.entries(text), b"}") == b",".join(written)


def text_of(number: int) -> bytes:
    return segments.join([b'{"number":%d}' % number] * 10)


def test_a_reader_cuts_each_segment_once_while_it_remembers_it() -> None:
    reader = Reader(max_bytes=2 * len(text_of(1)))
    first = reader.entries("first", text_of(1))
    assert first == [b'{"number":1'] * 10
    assert reader.entries("second", text_of(2)) == [b'{"number":2'] * 10
    assert reader.entries("first", text_of(1)) is first
    assert reader.entries("third", text_of(3)) == [b'{"number":3'] * 10  # the second one goes
    assert reader.entries("first", text_of(1)) is first
    reader.entries("fourth", text_of(4))
    reader.entries("fifth", text_of(5))
    assert reader.entries("first", text_of(1)) is not first


def test_a_reader_does_not_trust_the_key_alone() -> None:
    reader = Reader()
    assert reader.entries("key", text_of(1)) == [b'{"number":1'] * 10
    assert reader.entries("key", text_of(2)) == [b'{"number":2'] * 10
    assert reader.entries("key", text_of(2)) is reader.entries("key", text_of(2))


def test_a_reader_keeps_nothing_larger_than_it_may() -> None:
    reader = Reader(max_bytes=10)
    assert reader.entries("key", text_of(1)) == [b'{"number":1'] * 10
    assert reader.entries("key", text_of(1)) is not reader.entries("key", text_of(1))
