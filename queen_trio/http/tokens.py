"""Verifying tokens: signature, times, roles; each token once, then from memory."""

from __future__ import annotations

import time
import warnings
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import jwt
import structlog
from attrs import frozen
from jwt.warnings import InsecureKeyLengthWarning

from queen_trio.errors import QueenError
from queen_trio.model.roles import Identity, roles_untrusted

if TYPE_CHECKING:
    from collections.abc import Callable

    from queen_trio.config import JwtAlgorithm

    from .jwks import KeySource

log = structlog.get_logger(__name__)

# How far the clocks of issuer and broker may be apart.
LEEWAY_SECONDS: Final = 30.0
# A verified token is believed for this long without its key: what a withdrawn key still opens.
REMEMBER_SECONDS: Final = 300.0
# Tokens remembered; one has about a KiB.
REMEMBERED_TOKENS: Final = 4096

# The audience is not ours to know: no variable names it (docs/how-to/security.md).
_OPTIONS: Final[jwt.types.Options] = {"verify_aud": False}


class TokenRefused(QueenError):
    """The token proves nothing; the message is for its sender and tells nothing of the keys."""


@frozen
class _Remembered:
    identity: Identity
    until: float


class TokenVerifier:
    """Tells who sent a token; only tokens signed with the one configured algorithm count."""

    def __init__(
        self, algorithm: JwtAlgorithm, keys: KeySource, clock: Callable[[], float] = time.time
    ) -> None:
        """`clock` tells how old what is remembered is, in seconds since 1970."""
        self._algorithms = [algorithm.value]
        self._keys = keys
        self._clock = clock
        self._remembered: OrderedDict[str, _Remembered] = OrderedDict()

    async def verify(self, token: str) -> Identity:
        """Return the token's subject and roles.

        Raises `TokenRefused`, or `KeysUnavailable` while nothing can be verified. Blocks only for
        a key that isn't known yet.
        """
        known = self._remembered.get(token)
        if known is not None:
            if self._clock() < known.until:
                self._remembered.move_to_end(token)
                return known.identity
            del self._remembered[token]
        try:
            kid = jwt.get_unverified_header(token).get("kid")
            key = await self._keys.key_for(kid)
            if key is None:
                raise jwt.InvalidKeyError("no such key")
            with warnings.catch_warnings(action="ignore", category=InsecureKeyLengthWarning):
                # A short secret got its warning at boot.
                claims = jwt.decode(
                    token, key, self._algorithms, options=_OPTIONS, leeway=LEEWAY_SECONDS
                )
            identity = Identity(
                _subject(claims.get("sub")),
                roles_untrusted(claims.get("role"), claims.get("roles")),
            )
        except jwt.ExpiredSignatureError:
            raise TokenRefused("the token has expired") from None
        except jwt.ImmatureSignatureError:
            raise TokenRefused("the token is not valid yet") from None
        except jwt.PyJWTError as error:
            log.debug("token refused", reason=str(error))
            raise TokenRefused("the token is invalid") from None
        self._remember(token, identity, claims.get("exp"))
        return identity

    def _remember(self, token: str, identity: Identity, expiry: float | str | None) -> None:
        until = self._clock() + REMEMBER_SECONDS
        if expiry is not None:
            until = min(until, int(expiry) + LEEWAY_SECONDS)
        self._remembered[token] = _Remembered(identity, until)
        if len(self._remembered) > REMEMBERED_TOKENS:
            self._remembered.popitem(last=False)


def _subject(claim: str | None) -> str | None:
    """Check that a `sub` can be written into messages: a JSON escape may be half a character."""
    try:
        (claim or "").encode()
    except UnicodeEncodeError:
        raise jwt.InvalidTokenError("sub is not valid Unicode") from None
    return claim
