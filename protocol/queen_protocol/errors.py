"""Errors by who caused them: we misused the protocol, or the peer broke it.

A `LocalProtocolError` is a bug of this process and should surface as one. A `RemoteProtocolError`
closes the one link it came up on and is counted under its `reason`; it is never our bug, and it is
the only exception that a function whose name ends in `_untrusted` raises.
"""

from __future__ import annotations

from enum import StrEnum, unique


@unique
class Reason(StrEnum):
    """Why a link was closed; the value is fit for a metric label and never changes."""

    # FramingError
    BAD_LENGTH = "bad_length"
    TOO_LARGE = "too_large"
    HELLO_TOO_LARGE = "hello_too_large"
    # PayloadError
    BAD_JSON = "bad_json"
    BAD_FIELD = "bad_field"
    # HandshakeError
    BAD_MAC = "bad_mac"
    REPLAYED_NONCE = "replayed_nonce"
    LATE_HELLO = "late_hello"
    # SequenceError
    NOT_HELLO = "not_hello"
    SECOND_HELLO = "second_hello"
    UNEXPECTED_BYTES = "unexpected_bytes"


class ProtocolError(Exception):
    """Whatever this package raises on purpose."""


class LocalProtocolError(ProtocolError):
    """We asked for something that the protocol doesn't allow: our own bug."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol: close this link, count `reason`."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class FramingError(RemoteProtocolError):
    """A length prefix that can't be followed; nothing after it has a meaning."""


class PayloadError(RemoteProtocolError):
    """A whole frame whose payload isn't what its type calls for."""


class HandshakeError(RemoteProtocolError):
    """A HELLO that proves nothing, or that never came."""


class SequenceError(RemoteProtocolError):
    """Bytes that would be fine at another time, or on the link in the other direction."""
