"""/api/v1/status/analytics, /api/v1/analytics/… and /api/v1/stats/refresh: history and gauges.

Every time series has one row for each step that has data; `from`, `to` and `interval` (seconds, or
minute, hour, day) choose. Brokers write their counts at METRICS_FLUSH_MS.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import msgspec
from attrs import asdict

from queen_trio.broker import traffic
from queen_trio.errors import ClientError
from queen_trio.model.names import check_optional_name
from queen_trio.store.resources import Span

from .codec import json_response, timestamp
from .parameters import moment

if TYPE_CHECKING:
    from queen_trio.broker import Broker
    from queen_trio.store.resources import WorkerRow

    from .message import Request, Response

MINUTE_SECONDS: Final = 60
_INTERVALS: Final = {"minute": 60, "hour": 3600, "day": 86_400}
DEFAULT_SPAN: Final = timedelta(hours=1)
# Bounds an answer; a chart of a day by minute fits.
MAX_STEPS: Final = 10_000


async def analytics(broker: Broker, request: Request) -> Response:
    """Messages in and out over all brokers, and the lag of groups, over time."""
    queue = check_optional_name(request.text("queue"), "queue")
    namespace = check_optional_name(request.text("namespace"), "namespace")
    task = check_optional_name(request.text("task"), "task")
    span = _span(request)
    rows = await broker.resources.queue_traffic(queue, namespace, task, span)
    lag = await broker.resources.lag_history(queue, span)
    return json_response(
        _span_fields(span)
        | {
            "queue": queue,
            "totals": {
                "pushed": sum(row.pushed for row in rows),
                "popped": sum(row.popped for row in rows),
            },
            "timeSeries": [
                {
                    "timestamp": timestamp(row.at),
                    "pushed": row.pushed,
                    "popped": row.popped,
                    "pushedPerSecond": row.pushed / span.step_seconds,
                    "poppedPerSecond": row.popped / span.step_seconds,
                }
                for row in rows
            ],
            "lag": [
                {
                    "timestamp": timestamp(row.at),
                    "queueName": row.queue,
                    "consumerGroup": row.group,
                    "lag": row.lag,
                    "timeLagSeconds": row.time_lag_seconds,
                }
                for row in lag
            ],
        }
    )


async def system_metrics(broker: Broker, request: Request) -> Response:
    """CPU, memory and connections of each broker over time, and this one's pool now."""
    span = _span(request)
    rows = await broker.resources.worker_history(_server_id(request), span)
    return json_response(
        _span_fields(span)
        | {
            "serverId": broker.config.sync.server_id,
            "pool": asdict(broker.store.pool.statistics()),
            "wakeups": asdict(broker.wakeups.statistics()),
            "timeSeries": [
                _worker(row)
                | {
                    "cpuSeconds": row.cpu_ms / 1000,
                    "cpuShare": row.cpu_ms / 1000 / span.step_seconds,
                    "memoryBytes": row.rss_bytes,
                    "parkedPops": row.parked_pops,
                    "poolOpen": row.pool_open,
                    "poolInUse": row.pool_in_use,
                    "poolWaiting": row.pool_waiting,
                }
                for row in rows
            ],
        }
    )


async def worker_metrics(broker: Broker, request: Request) -> Response:
    """What each broker did over time."""
    span = _span(request)
    rows = await broker.resources.worker_history(_server_id(request), span)
    return json_response(
        _span_fields(span)
        | {
            "serverId": broker.config.sync.server_id,
            "workers": sorted({row.server_id for row in rows}),
            "timeSeries": [
                _worker(row)
                | {
                    "pushCalls": row.push_calls,
                    "pushed": row.pushed,
                    "popCalls": row.pop_calls,
                    "emptyPops": row.empty_pops,
                    "popped": row.popped,
                    "ackCalls": row.ack_calls,
                    "completed": row.completed,
                    "failed": row.failed,
                    "deadLettered": row.dead_lettered,
                    "databaseErrors": row.database_errors,
                }
                for row in rows
            ],
        }
    )


async def postgres_stats(broker: Broker, request: Request) -> Response:
    """How PostgreSQL does: size, connections, cache, tables."""
    return json_response(msgspec.Raw((await broker.resources.postgres_stats()).encode()))


async def refresh(broker: Broker, request: Request) -> Response:
    """Write this broker's counts and every group's lag down now; lists are computed anyway."""
    await traffic.flush(broker)
    return json_response({"success": True, "refreshed": await broker.resources.sample_lag()})


def _server_id(request: Request) -> str | None:
    return check_optional_name(request.text("serverId"), "serverId")


def _worker(row: WorkerRow) -> dict[str, Any]:
    return {"timestamp": timestamp(row.at), "serverId": row.server_id}


def _span(request: Request) -> Span:
    until = moment(request, "to") or datetime.now(UTC)
    since = moment(request, "from")
    if since is None:
        try:
            since = until - DEFAULT_SPAN
        except OverflowError:
            raise ClientError(f"to={request.query['to']} is out of range") from None
    if since > until:
        raise ClientError("from is after to")
    step = _step_seconds(request)
    least = (until - since).total_seconds() / MAX_STEPS
    if step < least:
        raise ClientError(f"from, to and interval ask for more than {MAX_STEPS} steps")
    return Span(since, until, step)


def _step_seconds(request: Request) -> int:
    """The width of a step; counts are kept by the minute, so it is a minute at least."""
    word = request.text("interval")
    if word in _INTERVALS:
        return _INTERVALS[word]
    seconds = request.integer("interval", least=1)
    return MINUTE_SECONDS if seconds is None else max(seconds, MINUTE_SECONDS)


def _span_fields(span: Span) -> dict[str, Any]:
    return {
        "from": timestamp(span.since),
        "to": timestamp(span.until),
        "intervalSeconds": span.step_seconds,
    }


ROUTES = {
    "/api/v1/status/analytics": {"GET": analytics},
    "/api/v1/analytics/system-metrics": {"GET": system_metrics},
    "/api/v1/analytics/worker-metrics": {"GET": worker_metrics},
    "/api/v1/analytics/postgres-stats": {"GET": postgres_stats},
    "/api/v1/stats/refresh": {"POST": refresh},
}
