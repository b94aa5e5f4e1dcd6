"""GET /openapi.json: what this API is, for programs; written from openapi.yaml by .ci/docs."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Final

from .message import Response

if TYPE_CHECKING:
    from queen_trio.broker import Broker

    from .message import Request

_DOCUMENT: Final = Response(200, files(__package__).joinpath("openapi.json").read_bytes())


async def openapi(broker: Broker, request: Request) -> Response:
    """Answer with the document."""
    return _DOCUMENT


ROUTES = {"/openapi.json": {"GET": openapi}}
