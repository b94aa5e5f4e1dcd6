"""GET /metrics/prometheus: the counts of this broker in Prometheus's format; asks no database.

Everything is read from the `statistics()` of whoever counts, at the moment of the scrape. A worker
adds what its siblings count: the same families, told apart by the label `worker`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from queen_trio import metrics
from queen_trio.broker.siblings import Topic, ask_all
from queen_trio.metrics import FAMILIES, Kind

from .message import Response
from .status import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client import Metric

    from queen_trio.broker import Broker
    from queen_trio.broker.siblings import Siblings
    from queen_trio.metrics import Family, Histogram

    from .message import Request

    Labelled = Mapping[Any, float]


async def prometheus(broker: Broker, request: Request) -> Response:
    """Show everything that this broker counts, and its siblings on this host."""
    # Here: it costs 40 ms to load, which the boot needn't wait for.
    from prometheus_client.exposition import choose_encoder

    accept = b",".join(v for k, v in request.scope["headers"] if k.lower() == b"accept")
    try:
        encode, content_type = choose_encoder(accept.decode("latin-1"))
    except TypeError:  # it trips over a version that is no number
        encode, content_type = choose_encoder("")
    found = _families(broker)
    if broker.siblings is not None:
        found = await _of_host(broker.siblings, found)
    body: bytes = encode(_Registry(found))
    return Response(200, body, ((b"content-type", content_type.encode()),))


class _Registry:
    """What prometheus_client's encoders read: anything with `collect`."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _families(broker: Broker) -> list[Metric]:
    return [metric for part in _PARTS for metric in part(broker)]


class _Sample(msgspec.Struct, array_like=True):
    name: str
    labels: dict[str, str]
    value: float


class _Sampled(msgspec.Struct, array_like=True):
    """A family as it travels from worker to worker."""

    name: str
    help: str
    kind: str
    samples: list[_Sample]


_sampled: Final = msgspec.msgpack.Decoder(list[_Sampled])  # not JSON, which has no infinity


def for_siblings(broker: Broker) -> bytes:
    """Say what this worker counts."""
    return msgspec.msgpack.encode(_sample(_families(broker)))


def _sample(families: list[Metric]) -> list[_Sampled]:
    return [
        _Sampled(
            family.name,
            family.documentation,
            family.type,
            [_Sample(sample.name, sample.labels, float(sample.value)) for sample in family.samples],
        )
        for family in families
    ]


async def _of_host(siblings: Siblings, own: list[Metric]) -> list[Metric]:
    """The families of all workers that answer, and which ones did."""
    from prometheus_client import Metric

    workers, missing = await ask_all(siblings, Topic.PROMETHEUS, _sample(own), _sampled.decode)
    merged: dict[str, Metric] = {}
    for index, families in workers.items():
        for family in families:
            metric = merged.setdefault(family.name, Metric(family.name, family.help, family.kind))
            for sample in family.samples:
                labels = {"worker": str(index), **sample.labels}
                metric.add_sample(sample.name, labels, sample.value)
    up = {str(index): index in workers for index in sorted([*workers, *missing])}
    return [_many(metrics.WORKER_UP, up), *merged.values()]


def _one(family: Family, value: float) -> Metric:
    return _many(family, {(): value})


def _many(family: Family, values: Labelled) -> Metric:
    """A counter or gauge with a value for each of its labels (a tuple, where it has several)."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    make: Any = CounterMetricFamily if family.kind is Kind.COUNTER else GaugeMetricFamily
    metric: Metric = make(family.name, family.help, labels=family.labels)
    for labels, value in values.items():
        metric.add_metric((labels,) if isinstance(labels, str) else labels, value)  # type: ignore[attr-defined]
    return metric


def _distribution(family: Family, values: Mapping[str, Histogram]) -> Metric:
    from prometheus_client.core import HistogramMetricFamily

    metric = HistogramMetricFamily(family.name, family.help, labels=family.labels)
    for label, histogram in values.items():
        metric.add_metric([label], histogram.cumulative(), histogram.sum)
    return metric


def _process(broker: Broker) -> Iterator[Metric]:
    from prometheus_client import ProcessCollector

    yield _many(metrics.INFO, {(broker.config.sync.server_id, VERSION): 1})
    yield _one(metrics.DRAINING, broker.draining)
    yield _many(metrics.NURSERY_RESTARTS, {"mesh": 0, "jobs": 0} | broker.restarts)
    jobs = broker.job_statistics()
    yield _many(metrics.JOB_RUNS, {job.name: job.runs for job in jobs})
    yield _many(metrics.JOB_FAILURES, {job.name: job.failures for job in jobs})
    # From procfs; elsewhere there are none.
    for found in ProcessCollector(registry=None).collect():
        for sample in found.samples:
            yield _one(FAMILIES[sample.name], sample.value)


def _requests(broker: Broker) -> Iterator[Metric]:
    requests = broker.requests
    yield _distribution(metrics.REQUEST_SECONDS, requests.seconds)
    yield _many(
        metrics.RESPONSES, {str(status): n for status, n in sorted(requests.responses.items())}
    )


def _messages(broker: Broker) -> Iterator[Metric]:
    totals = broker.traffic.totals()
    yield _one(metrics.PUSHED, totals["pushed"])
    yield _one(metrics.POPPED, totals["popped"])
    outcomes = ("completed", "failed", "dead_lettered")
    yield _many(metrics.ACKED, {outcome: totals[outcome] for outcome in outcomes})
    yield _one(metrics.PUSH_CALLS, totals["push_calls"])
    yield _one(metrics.POP_CALLS, totals["pop_calls"])
    yield _one(metrics.EMPTY_POPS, totals["empty_pops"])
    yield _one(metrics.ACK_CALLS, totals["ack_calls"])
    yield _one(metrics.DATABASE_ERRORS, totals["database_errors"])
    fused = {"push": broker.traffic.push_items, "ack": broker.traffic.ack_items}
    yield _distribution(metrics.FUSION_ITEMS, fused)


def _pool(broker: Broker) -> Iterator[Metric]:
    pool = broker.store.pool.statistics()
    yield _one(metrics.POOL_SIZE, pool.size)
    yield _one(metrics.POOL_LIMIT, pool.limit)
    yield _many(
        metrics.POOL_CONNECTIONS,
        {"idle": pool.idle, "in_use": pool.in_use, "connecting": pool.connecting},
    )
    yield _one(metrics.POOL_WAITING, pool.waiting)
    yield _one(metrics.POOL_OPENED, pool.opened_total)
    yield _one(metrics.POOL_CLOSED, pool.closed_total)
    yield _one(metrics.POOL_FAILURES, pool.connect_failures_total)
    yield _one(metrics.POOL_TIMEOUTS, pool.timeouts_total)


def _admission(broker: Broker) -> Iterator[Metric]:
    admission = broker.arbiter.statistics()
    lanes = {lane.label: numbers for lane, numbers in admission.lanes.items()}
    yield _one(metrics.ADMISSION_BUDGET, admission.budget)
    yield _many(metrics.ADMISSION_BAND, {"lo": admission.lo, "hi": admission.hi})
    for family, field in (
        (metrics.ADMISSION_INFLIGHT, "inflight"),
        (metrics.ADMISSION_WAITING, "waiting"),
        (metrics.ADMISSION_ADMITTED, "admitted_total"),
        (metrics.ADMISSION_WAITED, "waited_total"),
        (metrics.ADMISSION_WAIT_SECONDS, "wait_seconds_total"),
    ):
        yield _many(family, {name: getattr(numbers, field) for name, numbers in lanes.items()})
    yield _one(metrics.WAL_TRAINS, admission.trains_per_second)
    yield _one(metrics.WAL_TRANSACTIONS, admission.transactions_per_train)
    yield _one(metrics.WAL_CYCLE, admission.cycle_seconds)
    seconds = {lane.label: histogram for lane, histogram in broker.arbiter.seconds().items()}
    yield _distribution(metrics.CALL_SECONDS, seconds)


def _waiting(broker: Broker) -> Iterator[Metric]:
    wakeups = broker.wakeups.statistics()
    yield _one(metrics.PARKED_POPS, wakeups.parked)
    yield _one(metrics.PARKED_LINES, wakeups.lines)
    if broker.candidates is not None:
        hotlist = broker.candidates.statistics()
        yield _one(metrics.HOTLIST_RINGS, hotlist.rings)
        yield _one(metrics.HOTLIST_ENTRIES, hotlist.entries)
        yield _one(metrics.HOTLIST_READY, hotlist.ready)
    dedup = broker.pushes.dedup_statistics()
    yield _one(metrics.DEDUP_PARTITIONS, dedup.partitions)
    yield _one(metrics.DEDUP_BYTES, dedup.bytes)
    yield _one(metrics.UNDECIPHERABLE, broker.encryption.statistics().undecipherable)


def _mesh(broker: Broker) -> Iterator[Metric]:
    if broker.mesh_statistics is None:
        return
    mesh = broker.mesh_statistics()
    connected = sum(peer.connected for peer in mesh.peers)
    peers = {"connected": connected, "disconnected": len(mesh.peers) - connected}
    yield _many(metrics.MESH_PEERS, peers)
    yield _one(metrics.MESH_ALIVE, len(mesh.servers_alive))
    yield _one(metrics.MESH_SENT, mesh.messages_sent)
    yield _one(metrics.MESH_RECEIVED, mesh.messages_received)
    yield _one(metrics.MESH_DROPPED, mesh.messages_dropped)
    yield _one(metrics.MESH_HANDSHAKES, mesh.handshake_failures)
    yield _many(metrics.MESH_REFUSED, mesh.links_refused)


def _spool(broker: Broker) -> Iterator[Metric]:
    spool = broker.spool.statistics()
    yield _one(metrics.SPOOL_PENDING, spool.pending_messages)
    yield _one(metrics.SPOOL_BYTES, spool.pending_bytes)
    yield _one(metrics.SPOOL_MAX_BYTES, spool.max_bytes)
    yield _one(metrics.SPOOL_HEALTHY, spool.healthy)
    yield _one(metrics.SPOOL_QUARANTINED, spool.quarantined)
    yield _one(metrics.SPOOL_SPOOLED, spool.spooled_messages)
    yield _one(metrics.SPOOL_REPLAYED, spool.replayed_messages)
    yield _one(metrics.SPOOL_FAILED, spool.refused_messages)


def _backlog(broker: Broker) -> Iterator[Metric]:
    backlog = broker.backlog.statistics()
    if backlog.age_seconds is not None:
        yield _one(metrics.SAMPLE_AGE, backlog.age_seconds)
    lags = backlog.lags
    yield _many(metrics.LAG_MESSAGES, {(lag.queue, lag.group): lag.messages for lag in lags})
    yield _many(metrics.LAG_SECONDS, {(lag.queue, lag.group): lag.seconds for lag in lags})
    yield _one(metrics.LAG_OMITTED, backlog.lags_omitted)
    dead = backlog.dead_letters
    yield _many(metrics.DLQ_MESSAGES, {letters.queue: letters.messages for letters in dead})
    yield _one(metrics.DLQ_OMITTED, backlog.dead_letters_omitted)


_PARTS = (
    _process, _requests, _messages, _pool, _admission, _waiting, _mesh, _spool, _backlog
)  # fmt: skip

ROUTES = {"/metrics/prometheus": {"GET": prometheus}}
