"""From an exception to an answer: the request's boundary for errors."""

from __future__ import annotations

from typing import Final

import structlog

from queen_trio.errors import ClientError, DatabaseError, DatabaseUnavailable

from .codec import encode
from .message import JSON_HEADERS, Response

log = structlog.get_logger(__name__)

# One second: an outage that lasts longer than a request may wait is asked after again gently.
_RETRY_AFTER: Final = (*JSON_HEADERS, (b"retry-after", b"1"))


def problem(status: int, message: str, code: str | None = None, **more: object) -> Response:
    """Answer with an error in the form that the client reads: `error`, and `code` if it has one."""
    body: dict[str, object] = {"error": message}
    if code is not None:
        body["code"] = code
    return Response(status, encode(body | more))


def answer_error(error: Exception, what: str) -> Response:
    """Turn an exception into its answer; `what` was being done: "pop failed"."""
    if isinstance(error, ClientError):
        return problem(error.status, str(error), error.code)
    if isinstance(error, DatabaseUnavailable):
        log.warning(what, error=str(error))
        return Response(
            503, encode({"error": "the database is unavailable", "code": "database_unavailable"}),
            _RETRY_AFTER,
        )  # fmt: skip
    log.error(what, error=str(error), exc_info=not isinstance(error, DatabaseError))
    return problem(500, what)
