"""Every metric by its name, kind, labels and help text, and what gathers distributions.

This is the one list (spec 8.31): docs/reference/metrics.md is generated from it, and
http/prometheus.py can't expose what isn't in it.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import Enum
from typing import TYPE_CHECKING, Final

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Sequence


class Kind(Enum):
    """How a metric behaves; the value is its name in the exposition format."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@frozen
class Family:
    """A metric with all its label values; a counter's name ends in `_total`."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


class Histogram:
    """Counts observations by upper bound; one `observe` costs about 0.2 µs."""

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` ascend; what is above the last one is counted, too."""
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count `value` in the first bucket whose bound it doesn't pass."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, int]]:
        """Return each bound as text with the count of all at or below it; the last is +Inf."""
        total = 0
        buckets = []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return buckets


# From a cached statement to the client's time-out.
SECONDS: Final = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0
)  # fmt: skip
# From no fusion at all to what a full bundle carries.
ITEMS: Final = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 10_000.0)

FAMILIES: Final[dict[str, Family]] = {}


def _family(name: str, kind: Kind, text: str, *labels: str) -> Family:
    FAMILIES[name] = family = Family(name, kind, text, labels)
    return family


def _counter(name: str, text: str, *labels: str) -> Family:
    return _family(name, Kind.COUNTER, text, *labels)


def _gauge(name: str, text: str, *labels: str) -> Family:
    return _family(name, Kind.GAUGE, text, *labels)


def _histogram(name: str, text: str, *labels: str) -> Family:
    return _family(name, Kind.HISTOGRAM, text, *labels)


# -- the process -------------------------------------------------------------------------------
INFO = _gauge("queen_info", "Always 1; who answers.", "server_id", "version")
DRAINING = _gauge("queen_draining", "1 while the broker is stopping.")
NURSERY_RESTARTS = _counter(
    "queen_nursery_restarts_total", "Crashes after which a part was started again.", "nursery"
)
JOB_RUNS = _counter("queen_job_runs_total", "Iterations of a background job.", "job")
JOB_FAILURES = _counter("queen_job_failures_total", "Iterations that ended in an error.", "job")
PROCESS_CPU = _counter("process_cpu_seconds_total", "CPU time of the process.")
PROCESS_RESIDENT = _gauge("process_resident_memory_bytes", "Memory that the process holds.")
PROCESS_VIRTUAL = _gauge("process_virtual_memory_bytes", "Its address space.")
PROCESS_START = _gauge("process_start_time_seconds", "When it started, as a Unix timestamp.")
PROCESS_OPEN_FDS = _gauge("process_open_fds", "File descriptors in use.")
PROCESS_MAX_FDS = _gauge("process_max_fds", "File descriptors that it may use.")

# -- workers (absent without `--workers`) --------------------------------------------------------
WORKER_UP = _gauge("queen_worker_up", "1 for a worker whose counts are in this answer.", "worker")

# -- requests ----------------------------------------------------------------------------------
REQUEST_SECONDS = _histogram(
    "queen_request_seconds",
    "Time from the whole request to its answer; of a pop also the time that it was parked.",
    "operation",
)
RESPONSES = _counter("queen_responses_total", "Answers by HTTP status.", "status")

# -- messages ----------------------------------------------------------------------------------
PUSHED = _counter("queen_pushed_messages_total", "Messages committed.")
POPPED = _counter("queen_popped_messages_total", "Messages delivered, redeliveries included.")
ACKED = _counter(
    "queen_acked_messages_total",
    "Acknowledgements applied, by what became of the message: completed, failed, dead_lettered.",
    "outcome",
)
PUSH_CALLS = _counter("queen_push_calls_total", "Database calls that pushed.")
POP_CALLS = _counter("queen_pop_calls_total", "Database calls that looked for messages.")
EMPTY_POPS = _counter("queen_empty_pops_total", "Those of them that found none.")
ACK_CALLS = _counter("queen_ack_calls_total", "Database calls that acknowledged.")
FUSION_ITEMS = _histogram(
    "queen_fusion_items", "Messages that shared one database call (push or ack).", "lane"
)

# -- the database ------------------------------------------------------------------------------
DATABASE_ERRORS = _counter(
    "queen_database_errors_total", "Failed calls that pushed, popped or acknowledged."
)
CALL_SECONDS = _histogram(
    "queen_call_seconds",
    "Time of a write transaction, from its slot on: the wait for a connection and the statement.",
    "lane",
)
POOL_SIZE = _gauge("queen_pool_size", "DB_POOL_SIZE.")
POOL_LIMIT = _gauge("queen_pool_limit", "Connections that the server admits, up to the size.")
POOL_CONNECTIONS = _gauge(
    "queen_pool_connections", "Connections by state: idle, in_use, connecting.", "state"
)
POOL_WAITING = _gauge("queen_pool_waiting", "Calls that wait for a connection.")
POOL_OPENED = _counter("queen_pool_opened_total", "Connections opened.")
POOL_CLOSED = _counter("queen_pool_closed_total", "Connections closed.")
POOL_FAILURES = _counter("queen_pool_connect_failures_total", "Connections that failed to open.")
POOL_TIMEOUTS = _counter("queen_pool_timeouts_total", "Calls that got no connection in time.")

# -- admission ---------------------------------------------------------------------------------
ADMISSION_BUDGET = _gauge("queen_admission_budget", "Write transactions that may run at once.")
ADMISSION_BAND = _gauge("queen_admission_band", "Ends of the budget's band: lo, hi.", "end")
ADMISSION_INFLIGHT = _gauge("queen_admission_inflight", "Write transactions that run.", "lane")
ADMISSION_WAITING = _gauge("queen_admission_waiting", "Those that wait for a slot.", "lane")
ADMISSION_ADMITTED = _counter("queen_admission_admitted_total", "Slots given.", "lane")
ADMISSION_WAITED = _counter(
    "queen_admission_waited_total", "Times that a slot was not free at once.", "lane"
)
ADMISSION_WAIT_SECONDS = _counter(
    "queen_admission_wait_seconds_total", "Time spent waiting for slots.", "lane"
)
WAL_TRAINS = _gauge(
    "queen_admission_trains_per_second", "WAL flushes that carried commits of this broker."
)
WAL_TRANSACTIONS = _gauge(
    "queen_admission_transactions_per_train", "Commits of this broker that shared a flush."
)
WAL_CYCLE = _gauge("queen_admission_cycle_seconds", "Time between flushes under load, smoothed.")

# -- waiting -----------------------------------------------------------------------------------
PARKED_POPS = _gauge("queen_parked_pops", "Pops that wait for messages.")
PARKED_LINES = _gauge("queen_parked_lines", "Distinct things that they wait for.")
HOTLIST_RINGS = _gauge("queen_hotlist_rings", "(queue, group) pairs in the hot-list.")
HOTLIST_ENTRIES = _gauge("queen_hotlist_entries", "Partitions in it.")
HOTLIST_READY = _gauge("queen_hotlist_ready", "Those that may have messages now.")
DEDUP_PARTITIONS = _gauge("queen_dedup_partitions", "Partitions that the dedup filter knows.")
DEDUP_BYTES = _gauge("queen_dedup_bytes", "Memory that it takes.")
UNDECIPHERABLE = _counter(
    "queen_undecipherable_payloads_total", "Payloads that this broker's key doesn't open."
)

# -- the mesh (absent without peers) -----------------------------------------------------------
MESH_PEERS = _gauge("queen_mesh_peers", "Peers by state: connected, disconnected.", "state")
MESH_ALIVE = _gauge("queen_mesh_servers_alive", "Other brokers heard from lately.")
MESH_SENT = _counter("queen_mesh_sent_total", "Frames sent.")
MESH_RECEIVED = _counter("queen_mesh_received_total", "Frames received.")
MESH_DROPPED = _counter("queen_mesh_dropped_total", "Frames dropped, a queue being full.")
MESH_HANDSHAKES = _counter("queen_mesh_handshake_failures_total", "Handshakes that failed.")
MESH_REFUSED = _counter("queen_mesh_links_refused_total", "Accepted links closed.", "reason")

# -- the disk spool ----------------------------------------------------------------------------
SPOOL_PENDING = _gauge("queen_spool_pending_messages", "Buffered messages to be replayed.")
SPOOL_BYTES = _gauge("queen_spool_pending_bytes", "What they take on the disk.")
SPOOL_MAX_BYTES = _gauge("queen_spool_max_bytes", "FILE_BUFFER_MAX_BYTES.")
SPOOL_HEALTHY = _gauge("queen_spool_healthy", "1 while the spool can be written to.")
SPOOL_QUARANTINED = _gauge("queen_spool_quarantined_records", "Records set aside for good.")
SPOOL_SPOOLED = _counter("queen_spool_spooled_messages_total", "Messages answered `buffered`.")
SPOOL_REPLAYED = _counter("queen_spool_replayed_messages_total", "Those committed since.")
SPOOL_FAILED = _counter(
    "queen_spool_failed_messages_total", "Messages that the spool could not take."
)

# -- backlog, the same from every broker; as of the last sample (STATS_INTERVAL_MS) -------------
SAMPLE_AGE = _gauge("queen_backlog_age_seconds", "Age of the backlog below; absent before any.")
LAG_MESSAGES = _gauge(
    "queen_consumer_lag_messages",
    "Messages that a group has still to complete; the most behind, 200 at most.",
    "queue",
    "group",
)
LAG_SECONDS = _gauge("queen_consumer_lag_seconds", "Age of the oldest of them.", "queue", "group")
LAG_OMITTED = _gauge("queen_consumer_lag_omitted", "(queue, group) pairs beyond the 200.")
DLQ_MESSAGES = _gauge("queen_dlq_messages", "Dead letters; the most, 200 queues at most.", "queue")
DLQ_OMITTED = _gauge("queen_dlq_omitted", "Queues with dead letters beyond the 200.")
