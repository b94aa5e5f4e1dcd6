"""The ASGI application: from a request to its handler and back.

The routes stand at the end of each resource's file, in its `ROUTES`.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote

from queen_trio.errors import ClientError
from queen_trio.model.roles import Access

from . import (
    ack,
    analytics,
    dlq,
    groups,
    internal,
    messages,
    openapi,
    pop,
    prometheus,
    push,
    queues,
    resources,
    status,
    streams,
    system,
    traces,
    transaction,
)
from .auth import access_to
from .disconnect import EXTENSION
from .message import Handler, Request, Response
from .problems import answer_error, problem

if TYPE_CHECKING:
    from queen_trio.broker import Broker

    from .disconnect import DisconnectHook
    from .guard import Guard
    from .lean import Receive, Scope, Send

# The data plane by the beginning of its paths; a label of metrics, so there are only a few.
_OPERATIONS: Final = (
    ("/api/v1/push", "push"),
    ("/api/v1/pop", "pop"),
    ("/api/v1/ack", "ack"),
    ("/api/v1/transaction", "transaction"),
)


class App:
    """Routes requests of one broker; one broad `except` here is the request's boundary."""

    def __init__(self, broker: Broker, guard: Guard | None = None) -> None:
        """Without a guard everyone may do everything."""
        self._broker = broker
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request (ASGI 3)."""
        if scope["type"] != "http":
            return
        message = await receive()
        if message["type"] != "http.request":
            return
        body = message["body"]
        while message.get("more_body"):
            message = await receive()
            if message["type"] != "http.request":
                return
            body += message["body"]
        started = perf_counter()
        response = await self._respond(scope, receive, body)
        self._broker.requests.answered(
            _operation(scope["path"]), perf_counter() - started, response.status
        )
        if response.undelivered is not None and _is_gone_nowait(scope):
            # The kernel would take the answer and drop it: the first write to the gone succeeds.
            await response.undelivered()
            return
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": response.status,
                    "headers": _headers(response),
                }
            )
            await send({"type": "http.response.body", "body": response.body})
        except OSError:
            if response.undelivered is not None:
                await response.undelivered()
            raise

    async def _respond(self, scope: Scope, receive: Receive, body: bytes) -> Response:
        what = "request failed"
        try:
            route, path = _match(scope)
            if route is None:
                return problem(404, f"no such route: {scope['path']}", "no_such_route")
            endpoint = route.get(scope["method"])
            if endpoint is None:
                allowed = ", ".join(sorted(route))
                answer = problem(405, f"{scope['method']} is not allowed here, only {allowed}")
                return Response(405, answer.body, (*answer.headers, (b"allow", allowed.encode())))
            handler, access = endpoint
            what = f"{handler.__name__} failed".replace("_", " ")
            request = Request(scope, receive, body, path)
            if self._guard is not None and access is not Access.PUBLIC:
                admitted = await self._guard.admit(scope, access)
                if isinstance(admitted, Response):
                    return admitted
                request.subject = admitted.subject
            return await handler(self._broker, request)  # type: ignore[no-any-return]
        except Exception as error:  # the request's boundary
            return answer_error(error, what)


def _operation(path: str) -> str:
    """What a request is counted as in metrics."""
    for prefix, operation in _OPERATIONS:
        if path.startswith(prefix):
            return operation
    return "other"


def _is_gone_nowait(scope: Scope) -> bool:
    hook: DisconnectHook | None = scope.get("extensions", {}).get(EXTENSION)
    return hook is not None and hook.is_gone_nowait()


def _headers(response: Response) -> list[tuple[bytes, bytes]]:
    headers = list(response.headers)
    if response.status != 204:
        headers.append((b"content-length", b"%d" % len(response.body)))
    return headers


class _Endpoint(NamedTuple):
    handler: Handler
    access: Access


_Methods = dict[str, _Endpoint]
Routes = dict[str, dict[str, Handler]]
"""Path to method to handler; a segment ":name" of a path is variable."""


def _merge(*tables: Routes) -> dict[str, _Methods]:
    """Put the route tables of the resources together; a path may get its methods from several."""
    merged: dict[str, _Methods] = {}
    for table in tables:
        for path, handlers in table.items():
            methods = merged.setdefault(path, {})
            for method, handler in handlers.items():
                methods[method] = _Endpoint(handler, access_to(path, method))
    for path, methods in merged.items():
        # A pop changes what it reads: a HEAD would throw its messages away.
        if "GET" in methods and not path.startswith("/api/v1/pop"):
            methods["HEAD"] = methods["GET"]
    return merged


def _match(scope: Scope) -> tuple[_Methods | None, tuple[str, ...]]:
    """Find the methods of a path, and its variable segments, each decoded: a name may hold %2F."""
    raw: bytes = scope["raw_path"]
    if raw in _FIXED:
        return _FIXED[raw], ()
    segments = raw.split(b"/")
    for pattern, methods in _VARIABLE.get(len(segments), ()):
        if all(want is None or want == got for want, got in zip(pattern, segments, strict=True)):
            return methods, tuple(
                _decode(got) for want, got in zip(pattern, segments, strict=True) if want is None
            )
    return None, ()


def _decode(segment: bytes) -> str:
    try:
        return unquote(segment.decode("ascii"), errors="strict")
    except UnicodeDecodeError:
        raise ClientError(f"the path segment {segment!r} is not valid UTF-8") from None


_ROUTES: Final = _merge(
    openapi.ROUTES,
    status.ROUTES,
    prometheus.ROUTES,
    push.ROUTES,
    pop.ROUTES,
    ack.ROUTES,
    transaction.ROUTES,
    queues.ROUTES,
    dlq.ROUTES,
    messages.ROUTES,
    traces.ROUTES,
    groups.ROUTES,
    resources.ROUTES,
    analytics.ROUTES,
    streams.ROUTES,
    system.ROUTES,
    internal.ROUTES,
)
_FIXED: Final = {path.encode(): methods for path, methods in _ROUTES.items() if ":" not in path}
_VARIABLE: Final[dict[int, list[tuple[tuple[bytes | None, ...], _Methods]]]] = {}
for _path, _methods in _ROUTES.items():
    if ":" in _path:
        _pattern = tuple(None if part[:1] == ":" else part.encode() for part in _path.split("/"))
        _VARIABLE.setdefault(len(_pattern), []).append((_pattern, _methods))
