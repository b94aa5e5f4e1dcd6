"""POST /api/v1/push."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from queen_trio.model.message import PushItem, PushStatus, check_item

from .codec import decode_untrusted, encode
from .message import Response
from .problems import problem

if TYPE_CHECKING:
    from queen_trio.broker import Broker

    from .message import Request


class _PushBody(msgspec.Struct):
    items: list[PushItem]


_decoder = msgspec.json.Decoder(_PushBody)


async def push(broker: Broker, request: Request) -> Response:
    """Store the items of a push; one result for each, in order."""
    items = decode_untrusted(_decoder, request.body).items
    for index, item in enumerate(items):
        check_item(item, index)
    results = await broker.pushes.push(items, producer_sub=request.subject)
    if items and all(result.status is PushStatus.FAILED for result in results):
        return problem(500, f"push failed: {results[0].error}", "push_failed", results=results)
    return Response(201, encode(results))


ROUTES = {"/api/v1/push": {"POST": push}}
