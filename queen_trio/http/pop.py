"""GET /api/v1/pop…: claim messages, with a long poll where asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from queen_trio.config import SubscriptionMode
from queen_trio.errors import ClientError
from queen_trio.model.names import QUEUE_MODE_GROUP, check_name, check_optional_name
from queen_trio.model.pop import Claim, ClaimedPartition, PopRequest
from queen_trio.store.segments import splice

from .codec import encode, parse_timestamp, timestamp
from .disconnect import cancel_on_disconnect
from .message import NO_CONTENT, Response

if TYPE_CHECKING:
    from datetime import datetime

    from queen_trio.broker import Broker

    from .message import Request

DEFAULT_BATCH: Final = 200
# A day; a client that wants to wait longer asks again.
MAX_TIMEOUT_MS: Final = 24 * 3600 * 1000
# What is left of a request whose client has gone: giving the claim back.
RELEASE_SECONDS: Final = 5.0

_MODES: Final = {
    "all": SubscriptionMode.ALL,
    "from_beginning": SubscriptionMode.ALL,
    "new": SubscriptionMode.NEW,
    "new-only": SubscriptionMode.NEW,
}


async def pop_queue(broker: Broker, request: Request) -> Response:
    """Pop from any partition of a queue."""
    (queue,) = request.path
    return await _pop(broker, request, queue=check_name(queue, "queue"))


async def pop_partition(broker: Broker, request: Request) -> Response:
    """Pop from one partition."""
    queue, partition = request.path
    return await _pop(
        broker,
        request,
        queue=check_name(queue, "queue"),
        partition=check_name(partition, "partition"),
    )


async def pop_discover(broker: Broker, request: Request) -> Response:
    """Pop from any queue of a namespace, a task, or both."""
    namespace = check_optional_name(request.text("namespace"), "namespace") or ""
    task = check_optional_name(request.text("task"), "task") or ""
    if not namespace and not task:
        raise ClientError("a pop without a queue needs namespace or task")
    return await _pop(broker, request, queue=None, namespace=namespace, task=task)


async def _pop(
    broker: Broker,
    request: Request,
    *,
    queue: str | None,
    partition: str | None = None,
    namespace: str = "",
    task: str = "",
) -> Response:
    if request.flag("conflation"):
        raise ClientError("conflation is not supported", code="conflation_unsupported")
    partitions = request.integer("partitions")
    lease_seconds = request.integer("leaseSeconds")
    batch = request.integer("batch", least=1)
    pop = PopRequest(
        queue=queue,
        partition=partition,
        namespace=namespace,
        task=task,
        group=check_name(request.text("consumerGroup") or QUEUE_MODE_GROUP, "consumerGroup"),
        batch=DEFAULT_BATCH if batch is None else batch,
        partitions=1 if partitions is None else partitions if partitions > 0 else None,
        auto_ack=request.flag("autoAck"),
        lease_seconds=lease_seconds if lease_seconds and lease_seconds > 0 else None,
        mode=_mode(request, broker.config.pop.default_subscription_mode),
        since=_since(request),
        timeout=_timeout(request, broker.config.pop.default_timeout_ms),
    )
    if pop.timeout is None:
        claim = await broker.pops.pop(pop)
    else:
        claim = None
        async with cancel_on_disconnect(request.scope, request.receive) as presence:
            claim = await broker.pops.pop(pop)
        if presence.gone:
            if claim is not None:
                await _release(broker, claim)
            return NO_CONTENT
    if claim is None:
        return NO_CONTENT
    return Response(
        200,
        _render(claim, pop.group, discovery=queue is None),
        undelivered=lambda: _release(broker, claim),
    )


async def _release(broker: Broker, claim: Claim) -> None:
    with broker.store.pool.grace.shield(RELEASE_SECONDS):
        await broker.pops.release(claim)


def _mode(request: Request, default: SubscriptionMode) -> SubscriptionMode:
    word = request.text("subscriptionMode")
    if request.text("subscriptionFrom") == "now":
        return SubscriptionMode.NEW
    if word is None:
        return default
    if word not in _MODES:
        raise ClientError(f"subscriptionMode={word!r} is none of {', '.join(sorted(_MODES))}")
    return _MODES[word]


def _since(request: Request) -> datetime | None:
    """The subscription point asked for; None for `now`, which is `new` by PostgreSQL's clock."""
    word = request.text("subscriptionFrom")
    if word is None or word == "now":
        return None
    return parse_timestamp(word, "subscriptionFrom")


def _timeout(request: Request, default_ms: int) -> float | None:
    timeout_ms = request.integer("timeout", least=0, most=MAX_TIMEOUT_MS)
    if not request.flag("wait"):
        return None
    return (default_ms if timeout_ms is None else timeout_ms) / 1000


def _render(claim: Claim, group: str, *, discovery: bool) -> bytes:
    """Splice stored records into the answer; no message is parsed."""
    first = claim.partitions[0]
    lease = encode(claim.lease_id)
    group_json = encode(group)
    messages = [
        splice(
            segment.entries,
            _delivery_fields(part, timestamp(segment.created_at), lease, group_json, discovery),
        )
        for part in claim.partitions
        for segment in part.segments
    ]
    return b"".join(
        (
            b'{"success":true,"queue":',
            b'""' if discovery else encode(first.queue),
            b',"partition":',
            encode(first.partition),
            b',"partitionId":"%b","leaseId":%b,"consumerGroup":%b,"messages":['
            % (str(first.partition_id).encode(), lease, group_json),
            b",".join(messages),
            b'],"partitionsClaimed":%d}' % len(claim.partitions),
        )
    )


def _delivery_fields(
    part: ClaimedPartition, created_at: str | None, lease: bytes, group: bytes, discovery: bool
) -> bytes:
    """What only the delivery knows of a message, up to its closing brace."""
    return b"".join(
        (
            b',"createdAt":"%b","partitionId":"%b","partition":%b'
            % (
                (created_at or "").encode(),
                str(part.partition_id).encode(),
                encode(part.partition),
            ),
            b',"queue":' + encode(part.queue) if discovery else b"",
            b',"leaseId":%b,"consumerGroup":%b,"deliveryAttempt":%d}'
            % (lease, group, part.delivery_attempt),
        )
    )


ROUTES = {
    "/api/v1/pop": {"GET": pop_discover},
    "/api/v1/pop/queue/:queue": {"GET": pop_queue},
    "/api/v1/pop/queue/:queue/partition/:partition": {"GET": pop_partition},
}
