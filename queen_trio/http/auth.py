"""Who may call which route: the table, and the guard that asks for tokens (spec 2, "Auth")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from queen_trio.model.roles import Access, Identity

from .jwks import KeySource, KeysUnavailable, key_source
from .problems import problem
from .tokens import TokenRefused, TokenVerifier

if TYPE_CHECKING:
    from queen_trio.config import AuthConfig

    from .lean import Scope
    from .message import Response

_SCHEME: Final = b"bearer "
_REALM: Final = 'Bearer realm="queen"'
_RETRY_AFTER: Final = (b"retry-after", b"1")

# What each route asks of its caller. A HEAD asks what its GET asks; a test keeps this complete.
ROUTE_ACCESS: Final[dict[str, dict[str, Access]]] = {
    "/health": {"GET": Access.PUBLIC},
    "/metrics": {"GET": Access.PUBLIC},
    "/status": {"GET": Access.ANY_ROLE},
    "/openapi.json": {"GET": Access.ANY_ROLE},
    # messages
    "/api/v1/push": {"POST": Access.PRODUCE},
    "/api/v1/pop": {"GET": Access.CONSUME},
    "/api/v1/pop/queue/:queue": {"GET": Access.CONSUME},
    "/api/v1/pop/queue/:queue/partition/:partition": {"GET": Access.CONSUME},
    "/api/v1/ack": {"POST": Access.CONSUME},
    "/api/v1/ack/batch": {"POST": Access.CONSUME},
    "/api/v1/lease/:leaseId/extend": {"POST": Access.CONSUME},
    "/api/v1/transaction": {"POST": Access.CONSUME},
    # queues
    "/api/v1/configure": {"POST": Access.CONSUME},
    "/api/v1/resources/overview": {"GET": Access.LOOK},
    "/api/v1/resources/namespaces": {"GET": Access.LOOK},
    "/api/v1/resources/tasks": {"GET": Access.LOOK},
    "/api/v1/resources/partitions": {"GET": Access.LOOK},
    "/api/v1/resources/queues": {"GET": Access.LOOK},
    "/api/v1/resources/queues/:queue": {"GET": Access.LOOK, "DELETE": Access.ADMIN},
    "/api/v1/resources/queues/:queue/depth": {"GET": Access.LOOK},
    "/api/v1/queues/:queue/clear": {"DELETE": Access.ADMIN},
    # consumer groups
    "/api/v1/consumer-groups": {"GET": Access.LOOK},
    "/api/v1/consumer-groups/lagging": {"GET": Access.LOOK},
    "/api/v1/consumer-groups/:group": {"GET": Access.LOOK, "DELETE": Access.ADMIN},
    "/api/v1/consumer-groups/:group/subscription": {"POST": Access.CONSUME},
    "/api/v1/consumer-groups/:group/queues/:queue": {"DELETE": Access.ADMIN},
    "/api/v1/consumer-groups/:group/queues/:queue/seek": {"POST": Access.CONSUME},
    "/api/v1/consumer-groups/:group/queues/:queue/partitions/:partition/seek": {
        "POST": Access.CONSUME
    },
    # single messages, dead letters, traces
    "/api/v1/messages": {"GET": Access.LOOK},
    "/api/v1/messages/:partitionId/:transactionId": {"GET": Access.LOOK, "DELETE": Access.CONSUME},
    "/api/v1/messages/:partitionId/:transactionId/retry": {"POST": Access.CONSUME},
    "/api/v1/messages/:partitionId/:transactionId/dlq": {"POST": Access.CONSUME},
    "/api/v1/dlq": {"GET": Access.LOOK, "DELETE": Access.ADMIN},
    "/api/v1/dlq/:id/replay": {"POST": Access.CONSUME},
    "/api/v1/traces": {"POST": Access.CONSUME},
    "/api/v1/traces/names": {"GET": Access.LOOK},
    "/api/v1/traces/by-name/:name": {"GET": Access.LOOK},
    "/api/v1/traces/:partitionId/:transactionId": {"GET": Access.LOOK},
    # how it does
    "/api/v1/status": {"GET": Access.LOOK},
    "/api/v1/status/queues": {"GET": Access.LOOK},
    "/api/v1/status/queues/:queue": {"GET": Access.LOOK},
    "/api/v1/status/analytics": {"GET": Access.LOOK},
    "/api/v1/analytics/system-metrics": {"GET": Access.LOOK},
    "/api/v1/analytics/worker-metrics": {"GET": Access.LOOK},
    "/api/v1/analytics/postgres-stats": {"GET": Access.LOOK},
    "/api/v1/stats/refresh": {"POST": Access.ADMIN},
    # streams
    "/streams/v1/queries": {"POST": Access.CONSUME},
    "/streams/v1/state/get": {"POST": Access.CONSUME},
    "/streams/v1/cycle": {"POST": Access.CONSUME},
}


def access_to(path: str, method: str) -> Access:
    """What the route asks; one that was forgotten in the table is for admins only."""
    return ROUTE_ACCESS.get(path, {}).get(method, Access.ADMIN)


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
            answer = problem(503, str(error), "keys_unavailable")
            return attrs.evolve(answer, headers=(*answer.headers, _RETRY_AFTER))
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
    answer = problem(401, reason, "unauthorized")
    return attrs.evolve(
        answer, headers=(*answer.headers, (b"www-authenticate", challenge.encode()))
    )


def _forbidden(access: Access) -> Response:
    names = sorted(role.value for role in access.roles)
    answer = problem(403, f"this needs the role {' or '.join(names)}", "forbidden")
    challenge = f'{_REALM}, error="insufficient_scope"'
    return attrs.evolve(
        answer, headers=(*answer.headers, (b"www-authenticate", challenge.encode()))
    )
