"""/api/v1/consumer-groups…: lag, subscriptions, seek, delete (spec 2, "Consumer groups").

Queue mode is listed as the group __QUEUE_MODE__ where it has cursors: its lag is what an operator
of a queue without groups looks for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from queen_trio.errors import ClientError
from queen_trio.model.group import state_of
from queen_trio.model.names import check_name

from .codec import decode_untrusted, json_response, parse_timestamp, timestamp
from .problems import problem

if TYPE_CHECKING:
    from datetime import datetime

    from queen_trio.broker import Broker
    from queen_trio.store.groups import GroupPartitionRow, GroupRow

    from .message import Request, Response

LAGGING_SECONDS: Final = 3600
_STATE_ORDER: Final = ("Stable", "Lagging", "Dead")


class _SubscriptionBody(msgspec.Struct):
    subscriptionTimestamp: str


class _SeekBody(msgspec.Struct):
    toEnd: bool = False
    timestamp: str | None = None


_subscription = msgspec.json.Decoder(_SubscriptionBody)
_seek = msgspec.json.Decoder(_SeekBody)


async def list_groups(broker: Broker, request: Request) -> Response:
    """List each group in each of its queues."""
    return json_response([summary(row) for row in await broker.groups.list_groups()])


async def list_lagging(broker: Broker, request: Request) -> Response:
    """List those whose oldest open message is `minLagSeconds` old."""
    seconds = request.integer("minLagSeconds", least=0)
    rows = await broker.groups.list_groups(
        min_lag_seconds=LAGGING_SECONDS if seconds is None else seconds
    )
    return json_response([summary(row) for row in rows])


async def show_group(broker: Broker, request: Request) -> Response:
    """Show one group by queue and partition."""
    group = _group(request.path[0])
    rows, partitions = await broker.groups.detail(group)
    if not rows:
        return _unknown_group(group)
    by_queue: dict[str, list[dict[str, Any]]] = {}
    for part in partitions:
        by_queue.setdefault(part.queue, []).append(_partition(part))
    queues = [summary(row) | {"partitions": by_queue.get(row.queue, [])} for row in rows]
    return json_response(
        {
            "name": group,
            "consumerGroup": group,
            "topics": [row.queue for row in rows],
            "members": sum(row.members for row in rows),
            "totalLag": sum(row.total_lag for row in rows),
            "maxTimeLag": max(queue["maxTimeLag"] for queue in queues),
            "partitionsWithLag": sum(row.partitions_with_lag for row in rows),
            "state": max((queue["state"] for queue in queues), key=_STATE_ORDER.index),
            "queues": queues,
        }
    )


async def move_subscription(broker: Broker, request: Request) -> Response:
    """Set where cursors that don't exist yet will start; existing ones stay (seek moves those)."""
    group = _group(request.path[0])
    body = decode_untrusted(_subscription, request.body)
    point = parse_timestamp(body.subscriptionTimestamp, "subscriptionTimestamp")
    queues = await broker.groups.resubscribe(group, point)
    if not queues:
        return _unknown_group(group)
    return json_response(
        {
            "success": True,
            "consumerGroup": group,
            "subscriptionTimestamp": timestamp(point),
            "updated": len(queues),
        }
    )


async def seek_queue(broker: Broker, request: Request) -> Response:
    """Move a group's cursors in all partitions of a queue."""
    group, queue = request.path
    return await _seek_to(broker, request, group, queue, None)


async def seek_partition(broker: Broker, request: Request) -> Response:
    """Move a group's cursor in one partition."""
    group, queue, partition = request.path
    return await _seek_to(broker, request, group, queue, check_name(partition, "partition"))


async def _seek_to(
    broker: Broker, request: Request, group: str, queue: str, partition: str | None
) -> Response:
    _group(group)
    check_name(queue, "queue")
    # The client sends no body where it has no options: back to the beginning, so that nothing is
    # skipped which nobody asked to skip.
    body = decode_untrusted(_seek, request.body) if request.body else _SeekBody()
    since = None if body.timestamp is None else parse_timestamp(body.timestamp, "timestamp")
    if body.toEnd and since is not None:
        raise ClientError("seek takes toEnd or timestamp, not both")
    moved = await broker.groups.seek(group, queue, partition, to_end=body.toEnd, since=since)
    if moved is None:
        what = "Queue or consumer group" if partition is None else "Partition or consumer group"
        return problem(404, f"{what} not found", "not_found")
    return json_response(
        {
            "success": True,
            "consumerGroup": group,
            "queueName": queue,
            **({} if partition is None else {"partition": partition}),
            "partitionsUpdated": moved,
        }
    )


async def delete_group(broker: Broker, request: Request) -> Response:
    """Forget a group everywhere; one that doesn't exist is not an error, `deleted` tells."""
    return await _delete(broker, request, request.path[0], None)


async def delete_group_in_queue(broker: Broker, request: Request) -> Response:
    """Forget a group in one queue."""
    group, queue = request.path
    return await _delete(broker, request, group, check_name(queue, "queue"))


async def _delete(broker: Broker, request: Request, group: str, queue: str | None) -> Response:
    _group(group)
    metadata = request.flag("deleteMetadata") if request.text("deleteMetadata") else True
    deleted = await broker.groups.delete(group, queue, metadata=metadata)
    return json_response(
        {
            "success": True,
            "consumerGroup": group,
            **({} if queue is None else {"queueName": queue}),
            "deleted": bool(deleted.cursors or deleted.subscriptions),
            "deletedPartitions": deleted.cursors,
            "deletedSubscriptions": deleted.subscriptions,
        }
    )


def summary(row: GroupRow) -> dict[str, Any]:
    """A group in a queue, as lists show it; lag in messages and in seconds."""
    time_lag = _age_seconds(row.oldest_pending_at, row.now)
    idle = None if row.active_at is None else _age_seconds(row.active_at, row.now)
    return {
        "name": row.group,
        "consumerGroup": row.group,
        "queueName": row.queue,
        "topics": [row.queue],
        "members": row.members,
        "partitionCount": row.partitions,
        "totalLag": row.total_lag,
        "maxTimeLag": time_lag,
        "partitionsWithLag": row.partitions_with_lag,
        "state": state_of(time_lag, idle, row.members).value,
        "totalConsumed": row.total_consumed,
        "oldestPendingAt": timestamp(row.oldest_pending_at),
        "lastActivity": timestamp(row.active_at),
        "subscriptionMode": row.mode,
        "subscriptionTimestamp": timestamp(row.point),
        "subscriptionCreatedAt": timestamp(row.subscribed_at),
    }


def _partition(row: GroupPartitionRow) -> dict[str, Any]:
    leased = row.lease_expires_at is not None and row.lease_expires_at > row.now
    return {
        "partition": row.partition,
        "partitionId": row.partition_id,
        "committedOffset": row.next_offset - 1,
        "lastOffset": row.last_offset,
        "offsetLag": row.lag,
        "timeLagSeconds": _age_seconds(row.oldest_pending_at, row.now),
        "oldestPendingAt": timestamp(row.oldest_pending_at),
        "started": row.has_cursor,
        "leaseActive": leased,
        "leaseId": row.worker_id if leased else None,
        "leaseExpiresAt": timestamp(row.lease_expires_at) if leased else None,
        "processing": row.batch_end - row.next_offset + 1
        if leased and row.batch_end is not None
        else 0,
        "deliveries": row.deliveries,
        "failures": row.failures,
        "totalConsumed": row.total_consumed,
        "lastActivity": timestamp(row.active_at),
    }


def _age_seconds(moment: datetime | None, now: datetime) -> float:
    return 0.0 if moment is None else max((now - moment).total_seconds(), 0.0)


def _group(name: str) -> str:
    return check_name(name, "consumerGroup")


def _unknown_group(group: str) -> Response:
    return problem(404, "Consumer group not found", "consumer_group_not_found")


_GROUP: Final = "/api/v1/consumer-groups/:group"
ROUTES = {
    "/api/v1/consumer-groups": {"GET": list_groups},
    "/api/v1/consumer-groups/lagging": {"GET": list_lagging},
    _GROUP: {"GET": show_group, "DELETE": delete_group},
    f"{_GROUP}/subscription": {"POST": move_subscription},
    f"{_GROUP}/queues/:queue": {"DELETE": delete_group_in_queue},
    f"{_GROUP}/queues/:queue/seek": {"POST": seek_queue},
    f"{_GROUP}/queues/:queue/partitions/:partition/seek": {"POST": seek_partition},
}
