"""Who may call which route (spec 2, "Auth"); guard.py finds out who calls."""

from __future__ import annotations

from typing import Final

from queen_trio.model.roles import Access

# What each route asks of its caller. A HEAD asks what its GET asks; a test keeps this complete.
ROUTE_ACCESS: Final[dict[str, dict[str, Access]]] = {
    "/health": {"GET": Access.PUBLIC},
    "/metrics": {"GET": Access.PUBLIC},
    "/metrics/prometheus": {"GET": Access.PUBLIC},
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
    "/api/v1/status/buffers": {"GET": Access.LOOK},
    "/api/v1/system/maintenance": {"GET": Access.ADMIN, "POST": Access.ADMIN},
    "/api/v1/system/maintenance/pop": {"GET": Access.ADMIN, "POST": Access.ADMIN},
    "/api/v1/system/shared-state": {"GET": Access.ADMIN},
    # between brokers, and for those who run them (spec 8.25)
    "/internal/api/shared-state/stats": {"GET": Access.ADMIN},
    "/internal/api/inter-instance/stats": {"GET": Access.ADMIN},
    "/internal/api/notify": {"POST": Access.ADMIN},
    # streams
    "/streams/v1/queries": {"POST": Access.CONSUME},
    "/streams/v1/state/get": {"POST": Access.CONSUME},
    "/streams/v1/cycle": {"POST": Access.CONSUME},
}


def access_to(path: str, method: str) -> Access:
    """What the route asks; one that was forgotten in the table is for admins only."""
    return ROUTE_ACCESS.get(path, {}).get(method, Access.ADMIN)
