"""GET /health, /status, /api/v1/status and /metrics: does it serve, and what does it do."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
from attrs import asdict

from queen_trio.broker.siblings import Topic, ask_all
from queen_trio.errors import DatabaseError

from .codec import json_response

if TYPE_CHECKING:
    from queen_trio.broker import Broker

    from .message import Request, Response

log = structlog.get_logger(__name__)

VERSION: Final = version("queen-trio")
ENGINE: Final = "queen-trio"
# For a connection, when all is in use; and when the last attempt to open one failed: then a probe
# with a time-out of one second, the default of orchestrators, must get the answer, not run into it.
CONNECTION_SECONDS: Final = 2.0
OUTAGE_SECONDS: Final = 0.5
# For the query, on a server that has gone mute.
QUERY_SECONDS: Final = 1.0


async def health(broker: Broker, request: Request) -> Response:
    """Say whether requests can be served: a pooled connection, a real query (seeds: probes)."""
    postgres = None
    reason = None
    if broker.draining:
        reason = "the broker is stopping"
    else:
        pool = broker.store.pool
        try:
            postgres = await broker.store.ping(
                CONNECTION_SECONDS if pool.last_error is None else OUTAGE_SECONDS, QUERY_SECONDS
            )
        except DatabaseError as error:
            # Why is in the log: this answer is public, and the reason names hosts.
            log.debug("unhealthy", error=str(error))
            reason = (
                "PostgreSQL can't be reached"
                if pool.last_error
                else "no connection was free, or it failed"
            )
    healthy = postgres is not None
    body = {
        "status": "healthy" if healthy else "unhealthy",
        "database": "connected" if healthy else "unknown" if broker.draining else "disconnected",
        "engine": ENGINE,
        "version": VERSION,
    }
    if healthy:
        body["postgres"] = str(postgres)
    else:
        body["error"] = str(reason)
    return json_response(body, 200 if healthy else 503)


async def alive(broker: Broker, request: Request) -> Response:
    """Say that the process answers; asks no database."""
    return json_response(
        {
            "status": "draining" if broker.draining else "alive",
            "serverId": broker.config.sync.server_id,
            "engine": ENGINE,
            "version": VERSION,
        }
    )


async def status(broker: Broker, request: Request) -> Response:
    """Sum up queues and messages, and how this broker does."""
    queues = await broker.queues.list_all()
    return json_response(
        {
            "serverId": broker.config.sync.server_id,
            "engine": ENGINE,
            "version": VERSION,
            "queues": len(queues),
            "partitions": sum(queue.partitions for queue in queues),
            "messages": {
                "total": sum(queue.total for queue in queues),
                "pending": sum(queue.pending for queue in queues),
                "processing": sum(queue.processing for queue in queues),
            },
        }
    )


async def metrics(broker: Broker, request: Request) -> Response:
    """Show this process's gauges as JSON; with siblings, the sums of them all, and each."""
    own = _gauges(broker)
    if broker.siblings is None:
        return json_response({"serverId": broker.config.sync.server_id, **own})
    workers, missing = await ask_all(broker.siblings, Topic.METRICS, own, _decode)
    sums = {
        part: {name: sum(each[part][name] for each in workers.values()) for name in own[part]}
        for part in own
    }
    return json_response(
        {
            "serverId": broker.config.sync.server_id,
            **sums,
            "workers": [{"worker": index, **each} for index, each in workers.items()],
            "workersMissing": missing,
        }
    )


def for_siblings(broker: Broker) -> bytes:
    """Say what this worker's gauges show."""
    return msgspec.json.encode(_gauges(broker))


_Gauges = dict[str, dict[str, int]]
_decode: Final = msgspec.json.Decoder(_Gauges).decode


def _gauges(broker: Broker) -> _Gauges:
    return {
        "pool": asdict(broker.store.pool.statistics()),
        "wakeups": asdict(broker.wakeups.statistics()),
        "encryption": asdict(broker.encryption.statistics()),
    }


ROUTES = {
    "/health": {"GET": health},
    "/status": {"GET": alive},
    "/metrics": {"GET": metrics},
    "/api/v1/status": {"GET": status},
}
