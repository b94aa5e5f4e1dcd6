"""What brokers and operators ask: how the mesh does, and a hint from outside (spec 3, "Stats")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from attrs import asdict

from queen_trio.model.names import check_name, check_optional_name

from .codec import decode_untrusted, json_response

if TYPE_CHECKING:
    from queen_trio.broker import Broker

    from .message import Request, Response

TRANSPORT: Final = "tcp-mesh"


async def shared_state(broker: Broker, request: Request) -> Response:
    """Show what this broker knows of the others: for people, nothing is decided by it."""
    sync = broker.config.sync
    state: dict[str, Any] = {
        "server_id": sync.server_id,
        "transport": TRANSPORT,
        "maintenance_mode": broker.maintenance.push,
        "pop_maintenance_mode": broker.maintenance.pop,
    }
    if broker.mesh_statistics is None:
        reason = "no_peers" if sync.enabled else "sync_disabled"
        return json_response({"enabled": False, "reason": reason, **state})
    return json_response({"enabled": True, **state, **asdict(broker.mesh_statistics())})


class _Notify(msgspec.Struct):
    queue: str
    partition: str | None = None


_notify: Final = msgspec.json.Decoder(_Notify)


async def notify(broker: Broker, request: Request) -> Response:
    """Have every broker look at a queue again, or at one partition of it.

    For whoever writes to the database past the brokers; a hint like any other.
    """
    body = decode_untrusted(_notify, request.body)
    queue = check_name(body.queue, "queue")
    partition = check_optional_name(body.partition, "partition")
    if partition is None:
        broker.hints.queue_changed(queue)
    else:
        broker.hints.messages_available([(queue, partition)])
    return json_response({"success": True})


ROUTES = {
    "/internal/api/shared-state/stats": {"GET": shared_state},
    "/internal/api/inter-instance/stats": {"GET": shared_state},
    "/api/v1/system/shared-state": {"GET": shared_state},
    "/internal/api/notify": {"POST": notify},
}
