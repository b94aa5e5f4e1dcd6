"""Payload encryption: what goes in comes out, and nothing but what went in."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from queen_trio.broker.encryption import AGREE_ATTEMPTS, Encryption, EncryptionKeyMissing
from queen_trio.broker.segment import Drafted
from queen_trio.errors import DatabaseError
from queen_trio.model.encryption import (
    PayloadCipher,
    Undecipherable,
    envelope_of_letter,
    is_sealed,
    letter_payload,
    open_payload,
    open_record,
    seal_record,
    withhold,
)
from queen_trio.model.ids import Uuid7
from queen_trio.model.message import PushItem
from queen_trio.store.queries import Store
from queen_trio.store.sqlstate import ENCRYPTION_DIFFERS

if TYPE_CHECKING:
    from queen_trio.store.pool import Pool

KEY = bytes(range(32))
CIPHER = PayloadCipher(KEY)
ID = "0190d3a0-0000-7000-8000-000000000001"
TRACE_ID = "0190d3a0-0000-7000-8000-00000000000f"

# Verbatim: numbers that a float can't hold, white space, escapes.
PAYLOADS = st.one_of(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode()),
    st.sampled_from([b"1e400", b"0.10000000000000000000001", b'{ "a" :\t1 }', rb'"\u00e9\/"']),
)
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)


def record(payload: bytes, transaction_id: str = "t", sub: str | None = None) -> bytes:
    """A record as a push makes it."""
    item = PushItem("q", msgspec.Raw(payload), None, transaction_id, TRACE_ID)
    [draft] = Drafted.from_items([item], Uuid7(), sub).drafts.values()
    return draft.records[0]


@given(PAYLOADS, NAMES, st.none() | NAMES)
def test_a_sealed_record_opens_to_the_very_bytes(
    payload: bytes, transaction_id: str, sub: str | None
) -> None:
    plain = record(payload, transaction_id, sub)
    sealed = seal_record(CIPHER, plain)
    assert is_sealed(sealed)
    assert not is_sealed(plain)
    assert open_record(CIPHER, sealed) == plain


@given(PAYLOADS, NAMES)
def test_a_sealed_record_shows_all_but_the_payload(payload: bytes, transaction_id: str) -> None:
    plain = json.loads(record(payload, transaction_id, "someone"))
    sealed = json.loads(seal_record(CIPHER, record(payload, transaction_id, "someone")))
    assert sealed.pop("sealed") == 1
    assert set(sealed["data"]) == {"encrypted", "iv", "authTag"}
    assert list(sealed) == ["id", "transactionId", "traceId", "data", "producerSub"]
    assert sealed["transactionId"] == plain["transactionId"]
    assert sealed["traceId"] == plain["traceId"] == TRACE_ID
    assert sealed["producerSub"] == "someone"


def test_the_payload_is_not_in_the_record() -> None:
    assert b"secret" not in seal_record(CIPHER, record(b'"secret"'))


def test_equal_payloads_look_different() -> None:
    assert CIPHER.seal(b"1", ID, "t") != CIPHER.seal(b"1", ID, "t")


def test_an_envelope_is_aes_256_gcm_as_the_standard_says() -> None:
    """Test case 16 of the GCM specification, but for its associated data."""
    key = bytes.fromhex("feffe9928665731c6d6a8f9467308308" * 2)
    iv = bytes.fromhex("cafebabefacedbaddecaf888")
    text = bytes.fromhex("d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72")
    envelope = json.loads(PayloadCipher(key, lambda n: iv[:n]).seal(text, ID, "t"))
    assert envelope["iv"] == "yv66vvrO263eyviI"
    expected = "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"
    assert msgspec.json.decode(json.dumps(envelope["encrypted"]), type=bytes).hex() == expected


@given(PAYLOADS, st.data())
def test_one_changed_bit_is_noticed(payload: bytes, data: st.DataObject) -> None:
    envelope = json.loads(CIPHER.seal(payload, ID, "t"))
    part = data.draw(st.sampled_from(sorted(envelope)))
    content = bytearray(msgspec.json.decode(json.dumps(envelope[part]), type=bytes))
    bit = data.draw(st.integers(0, len(content) * 8 - 1))
    content[bit // 8] ^= 1 << bit % 8
    envelope[part] = json.loads(msgspec.json.encode(bytes(content)))
    with pytest.raises(Undecipherable, match="key is another one, or the payload was changed"):
        CIPHER.open(json.dumps(envelope).encode(), ID, "t")


@pytest.mark.parametrize(("message_id", "transaction_id"), [(ID, "other"), (ID[:-1] + "2", "t")])
def test_an_envelope_opens_beside_no_other_message(message_id: str, transaction_id: str) -> None:
    envelope = CIPHER.seal(b"1", ID, "t")
    assert CIPHER.open(envelope, ID, "t") == b"1"
    with pytest.raises(Undecipherable):
        CIPHER.open(envelope, message_id, transaction_id)


def test_another_key_opens_nothing() -> None:
    with pytest.raises(Undecipherable, match="key is another one"):
        open_record(PayloadCipher(bytes(32)), seal_record(CIPHER, record(b"1")))


def test_no_key_opens_nothing() -> None:
    with pytest.raises(Undecipherable, match="has no key"):
        open_record(None, seal_record(CIPHER, record(b"1")))


@pytest.mark.parametrize(
    "envelope",
    [
        b"null",
        b"[]",
        b"{}",
        b'{"encrypted":"","iv":"","authTag":""}',
        b'{"encrypted":1,"iv":"AAAAAAAAAAAAAAAA","authTag":"AAAAAAAAAAAAAAAAAAAAAA=="}',
        b'{"encrypted":"*","iv":"AAAAAAAAAAAAAAAA","authTag":"AAAAAAAAAAAAAAAAAAAAAA=="}',
        b'{"encrypted":"\xc3\xa9","iv":"AAAAAAAAAAAAAAAA","authTag":"AAAAAAAAAAAAAAAAAAAAAA=="}',
        b'{"encrypted":"AA==","iv":"AAAA","authTag":"AAAAAAAAAAAAAAAAAAAAAA=="}',
        b'{"encrypted":"AA==","iv":"AAAAAAAAAAAAAAAA","authTag":"AA=="}',
        b'{"encrypted"',
    ],
)
def test_a_damaged_envelope_is_said_to_be_one(envelope: bytes) -> None:
    with pytest.raises(Undecipherable, match="the envelope is damaged"):
        CIPHER.open(envelope, ID, "t")


@given(st.binary())
def test_whatever_stands_for_an_envelope(envelope: bytes) -> None:
    with pytest.raises(Undecipherable):
        CIPHER.open(envelope, ID, "t")


def test_what_cannot_be_opened_is_withheld_and_the_rest_stays() -> None:
    plain = record(b'"secret"', "t", "someone")
    withheld: dict[str, Any] = json.loads(withhold(seal_record(CIPHER, plain), 'a "reason"'))
    assert withheld == json.loads(plain) | {"data": None, "decryptionError": 'a "reason"'}


@pytest.mark.parametrize("payload", [b'"sealed:"', b'{"encrypted":"","iv":"","authTag":""}', b"1"])
def test_a_dead_letter_keeps_an_envelope_apart_from_json(payload: bytes) -> None:
    plain = record(payload, "t")
    assert envelope_of_letter(letter_payload(plain, payload)) is None
    assert letter_payload(plain, payload) == payload.decode()

    message = json.loads(plain)
    envelope = CIPHER.seal(payload, message["id"], "t")
    letter = letter_payload(seal_record(CIPHER, plain), envelope)
    assert envelope_of_letter(letter) == envelope
    assert open_payload(CIPHER, envelope, message["id"], "t") == payload


# -- what a broker knows of queues -------------------------------------------------------------


async def test_a_stale_memory_is_put_right_before_the_next_attempt(pool: Pool) -> None:
    store = Store(pool)
    await store.configure("q", None, None, '{"encryption_enabled":true}', False)
    encryption = Encryption(store, KEY)
    encryption.note("gone", enabled=True)
    attempts = []

    async def call() -> str:
        attempts.append([encryption.encode(queue, [record(b"1")]).sealed for queue in queues])
        if len(attempts) == 1:
            raise DatabaseError("differs", sqlstate=ENCRYPTION_DIFFERS)
        return "done"

    queues = ["q", "gone"]
    assert await encryption.agree(queues, call) == "done"
    assert attempts == [[False, True], [True, False]]
    encryption.forget("q")
    assert not encryption.encode("q", [record(b"1")]).sealed


@pytest.mark.parametrize(("sqlstate", "attempts"), [(ENCRYPTION_DIFFERS, AGREE_ATTEMPTS), ("X", 1)])
async def test_agreement_is_not_sought_for_ever(pool: Pool, sqlstate: str, attempts: int) -> None:
    calls = 0

    async def call() -> None:
        nonlocal calls
        calls += 1
        raise DatabaseError("no", sqlstate=sqlstate)

    with pytest.raises(DatabaseError, match="no"):
        await Encryption(Store(pool), KEY).agree(["q"], call)
    assert calls == attempts


async def test_without_a_key_nothing_is_encoded(pool: Pool) -> None:
    encryption = Encryption(Store(pool), None)
    encryption.note("q", enabled=True)
    with pytest.raises(EncryptionKeyMissing, match="'q' needs encryption"):
        encryption.encode("q", [record(b"1")])
