"""Asking for tokens: lets a request pass, or answers it with 401, 403 or 503."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from .jwks import KeySource, KeysUnavailable, key_source
from .problems import problem
from .tokens import TokenRefused, TokenVerifier

if TYPE_CHECKING:
    from queen_trio.config import AuthConfig
    from queen_trio.model.roles import Access, Identity

    from .lean import Scope
    from .message import Response

_SCHEME: Final = b"bearer "
_REALM: Final = 'Bearer realm="queen"'


class Guard:
    """Lets a request pass or gives the answer that refuses it; run `serve` beside it."""

    def __init__(self, auth: AuthConfig) -> None:
        """Raises `ConfigError` for a key that can't be used."""
        self._keys: KeySource = key_source(auth)
        self._verifier = TokenVerifier(auth.algorithm, self._keys)

    async def serve(self) -> None:
        """Keep the issuer's keys fresh until cancelled; returns at once with a fixed key."""
        await self._keys.serve()

    async def admit(self, scope: Scope, access: Access) -> Identity | Response:
        """Return who sent the request, or the 401, 403 or 503 for it.

        Blocks only while the key of a token is being fetched.
        """
        token = _bearer(scope)
        if token is None:
            # RFC 6750, 3.1: a request that brought no token is told no error.
            return _unauthorized("this needs a bearer token", _REALM)
        try:
            identity = await self._verifier.verify(token)
        except TokenRefused as refused:
            reason = str(refused)
            return _unauthorized(
                reason, f'{_REALM}, error="invalid_token", error_description="{reason}"'
            )
        except KeysUnavailable as error:
            return _with(problem(503, str(error), "keys_unavailable"), b"retry-after", "1")
        if not identity.may(access):
            return _forbidden(access)
        return identity


def _bearer(scope: Scope) -> str | None:
    """Find the token; None without one, or with several, of which we'd have to choose."""
    values = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
    if len(values) != 1 or values[0][: len(_SCHEME)].lower() != _SCHEME:
        return None
    token: bytes = values[0][len(_SCHEME) :].strip()
    return token.decode("latin-1") or None


def _unauthorized(reason: str, challenge: str) -> Response:
    return _with(problem(401, reason, "unauthorized"), b"www-authenticate", challenge)


def _forbidden(access: Access) -> Response:
    names = sorted(role.value for role in access.roles)
    answer = problem(403, f"this needs the role {' or '.join(names)}", "forbidden")
    return _with(answer, b"www-authenticate", f'{_REALM}, error="insufficient_scope"')


def _with(answer: Response, name: bytes, value: str) -> Response:
    return attrs.evolve(answer, headers=(*answer.headers, (name, value.encode())))
