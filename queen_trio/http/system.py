"""GET and POST /api/v1/system/maintenance[/pop], GET /api/v1/status/buffers (spec 2, "System")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from queen_trio.broker.maintenance import Switch
from queen_trio.broker.siblings import Topic, ask_all

from .codec import decode_untrusted, json_response

if TYPE_CHECKING:
    from queen_trio.broker import Broker

    from .message import Request, Response


class _Switched(msgspec.Struct):
    enabled: bool


_switched: Final = msgspec.json.Decoder(_Switched)


async def show_maintenance(broker: Broker, request: Request) -> Response:
    """Show both modes and this broker's spool; with siblings, the spools of all."""
    return json_response(
        {
            "maintenanceMode": broker.maintenance.push,
            "popMaintenanceMode": broker.maintenance.pop,
            **await _buffers(broker),
        }
    )


async def set_maintenance(broker: Broker, request: Request) -> Response:
    """Send pushes to the spool, or back to PostgreSQL, on every broker."""
    enabled = decode_untrusted(_switched, request.body).enabled
    await broker.maintenance.store(Switch.PUSH, enabled=enabled)
    broker.hints.maintenance_set(enabled)
    buffers = await _buffers(broker)
    return json_response(
        {
            "maintenanceMode": enabled,
            "bufferedMessages": buffers["bufferedMessages"],
            "bufferHealthy": buffers["bufferHealthy"],
            "message": "pushes go to the spool"
            if enabled
            else "pushes are committed, the spool is being replayed",
        }
    )


async def show_pop_maintenance(broker: Broker, request: Request) -> Response:
    """Show whether pops get nothing."""
    return json_response({"popMaintenanceMode": broker.maintenance.pop})


async def set_pop_maintenance(broker: Broker, request: Request) -> Response:
    """Give pops nothing, or what there is, on every broker."""
    enabled = decode_untrusted(_switched, request.body).enabled
    await broker.maintenance.store(Switch.POP, enabled=enabled)
    broker.hints.pop_maintenance_set(enabled)
    return json_response(
        {
            "popMaintenanceMode": enabled,
            "message": "pops get nothing" if enabled else "pops get what there is",
        }
    )


async def show_buffers(broker: Broker, request: Request) -> Response:
    """Show what waits in this broker's spool and what was set aside; with siblings, of all."""
    return json_response(await _buffers(broker))


async def _buffers(broker: Broker) -> dict[str, Any]:
    own = _own_buffer(broker)
    if broker.siblings is None:
        return own
    workers, missing = await ask_all(broker.siblings, Topic.BUFFERS, own, msgspec.json.decode)
    return {
        "bufferedMessages": sum(each["bufferedMessages"] for each in workers.values()),
        "bufferHealthy": all(each["bufferHealthy"] for each in workers.values()),
        "bufferStats": own["bufferStats"],
        "workers": [{"worker": index, **each} for index, each in workers.items()],
        "workersMissing": missing,
    }


def for_siblings(broker: Broker) -> bytes:
    """Say what waits in this worker's spool."""
    return msgspec.json.encode(_own_buffer(broker))


def _own_buffer(broker: Broker) -> dict[str, Any]:
    statistics = broker.spool.statistics()
    return {
        "bufferedMessages": statistics.pending_messages,
        "bufferHealthy": statistics.healthy,
        "bufferStats": _statistics(broker),
    }


def _statistics(broker: Broker) -> dict[str, Any]:
    statistics = broker.spool.statistics()
    return {
        "serverId": broker.config.sync.server_id,
        "directory": statistics.directory,
        "maxBytes": statistics.max_bytes,
        "paused": broker.maintenance.push,
        "pendingRecords": statistics.pending_records,
        "pendingMessages": statistics.pending_messages,
        "pendingBytes": statistics.pending_bytes,
        "quarantinedRecords": statistics.quarantined,
        "quarantinedBytes": statistics.quarantined_bytes,
        "spooledMessages": statistics.spooled_messages,
        "replayedMessages": statistics.replayed_messages,
        "refusedMessages": statistics.refused_messages,
        "error": statistics.trouble,
    }


ROUTES = {
    "/api/v1/system/maintenance": {"GET": show_maintenance, "POST": set_maintenance},
    "/api/v1/system/maintenance/pop": {"GET": show_pop_maintenance, "POST": set_pop_maintenance},
    "/api/v1/status/buffers": {"GET": show_buffers},
}
