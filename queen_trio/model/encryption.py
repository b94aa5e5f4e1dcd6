"""Payloads encrypted at rest: AES-256-GCM, a nonce of its own for each (spec 5).

A sealed record is a message object whose payload is an envelope. Its first key says so: a client
may push something that looks like an envelope, but no plain record starts with `sealed`.

    {"sealed":1,"id":"…","transactionId":"…","traceId":null,
     "data":{"encrypted":"…","iv":"…","authTag":"…"},"producerSub":null}

The envelope holds base64. It is bound to the id and the transactionId beside it, which stay in the
clear as everything but the payload does: broker and operators look messages up by them. Nonces are
random, so one key is good for 2**32 payloads (NIST SP 800-38D, 8.3).
"""

from __future__ import annotations

import os
from binascii import a2b_base64, b2a_base64
from typing import TYPE_CHECKING, Final

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from queen_trio.errors import QueenError

if TYPE_CHECKING:
    from collections.abc import Callable

IV_BYTES: Final = 12
TAG_BYTES: Final = 16

# How a sealed record starts, and no other.
SEALED: Final = b'{"sealed":1,'
# What a dead letter's payload, JSON otherwise, starts with when it is an envelope.
_LETTER_MARK: Final = "sealed:"

_encode = msgspec.json.encode


class Undecipherable(QueenError):
    """An envelope that this key doesn't open, or that somebody has changed."""


class _Envelope(msgspec.Struct, frozen=True, gc=False):
    encrypted: str
    iv: str
    authTag: str


class _Record(msgspec.Struct, frozen=True, gc=False):
    """A message object with its payload untouched, in the order in which it is written."""

    id: str
    transactionId: str
    traceId: str | None
    data: msgspec.Raw
    producerSub: str | None


_decode_envelope = msgspec.json.Decoder(_Envelope).decode
_decode_record = msgspec.json.Decoder(_Record).decode


class PayloadCipher:
    """Seals and opens payloads with one 32-byte key; `entropy(n)` gives n random bytes."""

    def __init__(self, key: bytes, entropy: Callable[[int], bytes] = os.urandom) -> None:
        self._aead = AESGCM(key)
        self._entropy = entropy

    def seal(self, payload: bytes, message_id: str, transaction_id: str) -> bytes:
        """Encrypt a payload and return its envelope, a JSON object."""
        iv = self._entropy(IV_BYTES)
        sealed = self._aead.encrypt(iv, payload, _binding(message_id, transaction_id))
        return b'{"encrypted":"%b","iv":"%b","authTag":"%b"}' % (
            b2a_base64(sealed[:-TAG_BYTES], newline=False),
            b2a_base64(iv, newline=False),
            b2a_base64(sealed[-TAG_BYTES:], newline=False),
        )

    def open(self, envelope: bytes, message_id: str, transaction_id: str) -> bytes:
        """Give a payload back; raises `Undecipherable`."""
        try:
            parts = _decode_envelope(envelope)
            iv, tag, text = (
                a2b_base64(part, strict_mode=True)
                for part in (parts.iv, parts.authTag, parts.encrypted)
            )
            if len(tag) != TAG_BYTES or len(iv) != IV_BYTES:
                raise Undecipherable("the envelope is damaged")
            return self._aead.decrypt(iv, text + tag, _binding(message_id, transaction_id))
        except InvalidTag:
            raise Undecipherable("the key is another one, or the payload was changed") from None
        except ValueError:  # not JSON, not an envelope, not base64
            raise Undecipherable("the envelope is damaged") from None


def _binding(message_id: str, transaction_id: str) -> bytes:
    """What an envelope is bound to: it opens beside no other message."""
    return _encode((message_id, transaction_id))


def is_sealed(record: bytes) -> bool:
    """Say whether a record's payload is an envelope."""
    return record.startswith(SEALED)


def seal_record(cipher: PayloadCipher, record: bytes) -> bytes:
    """Return a record with its payload encrypted."""
    message = _decode_record(record)
    envelope = cipher.seal(bytes(message.data), message.id, message.transactionId)
    return SEALED + _encode(_with_data(message, envelope))[1:]


def open_record(cipher: PayloadCipher | None, record: bytes) -> bytes:
    """Return a sealed record as it was before; raises `Undecipherable` (None: there is no key)."""
    try:
        message = _decode_record(record)
    except msgspec.DecodeError:
        raise Undecipherable("the record is damaged") from None
    payload = open_payload(cipher, bytes(message.data), message.id, message.transactionId)
    return _encode(_with_data(message, payload))


def withhold(record: bytes, why: str) -> bytes:
    """Return a sealed record that can't be opened as consumers see it: `data` null, and why.

    Where the record itself is damaged its ids are lost too.
    """
    try:
        message = _with_data(_decode_record(record), b"null")
    except msgspec.DecodeError:
        message = _Record("", "", None, msgspec.Raw(b"null"), None)
    return b'%b,"decryptionError":%b}' % (_encode(message)[:-1], _encode(why))


def open_payload(
    cipher: PayloadCipher | None, envelope: bytes, message_id: str, transaction_id: str
) -> bytes:
    """Open an envelope; raises `Undecipherable`, without a key too."""
    if cipher is None:
        raise Undecipherable("the payload is encrypted, and this broker has no key")
    return cipher.open(envelope, message_id, transaction_id)


def letter_payload(record: bytes, data: bytes) -> str:
    """Return what a dead letter keeps of a record's `data`: JSON, or a marked envelope."""
    return (_LETTER_MARK if is_sealed(record) else "") + data.decode()


def envelope_of_letter(payload: str) -> bytes | None:
    """Return the envelope in a dead letter's payload; None for one that is plain JSON."""
    mark = len(_LETTER_MARK)
    return payload[mark:].encode() if payload.startswith(_LETTER_MARK) else None


def _with_data(message: _Record, data: bytes) -> _Record:
    return _Record(
        message.id, message.transactionId, message.traceId, msgspec.Raw(data), message.producerSub
    )
