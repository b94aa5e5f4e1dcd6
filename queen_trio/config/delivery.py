"""How messages flow: pops and their waiting, admission of writes, background jobs."""

# ruff: noqa: RUF009 - `setting` declares a field
from __future__ import annotations

from enum import Enum

import attrs

from .parsers import Boolean, Choice, Decimal, Integer
from .variables import DAY_MS, GIB, HOUR_MS, MINUTE_MS, optional, setting

ADMISSION_FLOOR = 8  # write transactions; below it a WAL flush carries too little (spec 4)


class SubscriptionMode(Enum):
    """Where the cursor of a new consumer group starts (spec 2)."""

    NEW = "new"
    ALL = "all"


@attrs.frozen(kw_only=True)
class PopConfig:
    """Defaults of pops, and how a parked one re-probes between wakes (spec 2)."""

    wait_initial_ms: int = setting(
        "POP_WAIT_INITIAL_INTERVAL_MS",
        Integer(1, HOUR_MS),
        "First interval between the probes of a parked pop.",
        default="100",
        unit="ms",
    )
    backoff_threshold: int = setting(
        "POP_WAIT_BACKOFF_THRESHOLD",
        Integer(0, 1_000_000),
        "Empty probes before the interval grows.",
        default="3",
    )
    backoff_multiplier: float = setting(
        "POP_WAIT_BACKOFF_MULTIPLIER",
        Decimal(1, 100),
        "Factor by which it grows then.",
        default="2",
    )
    max_ms: int = setting(
        "POP_WAIT_MAX_INTERVAL_MS",
        Integer(1, HOUR_MS),
        "Longest interval: the latency of a wake that the mesh lost.",
        default="1000",
        unit="ms",
    )
    default_timeout_ms: int = setting(
        "DEFAULT_TIMEOUT",
        Integer(1, DAY_MS),
        "How long a pop waits that asks to wait and gives no timeout.",
        default="30000",
        unit="ms",
    )
    default_subscription_mode: SubscriptionMode = setting(
        "DEFAULT_SUBSCRIPTION_MODE",
        Choice(
            SubscriptionMode,
            {"new-only": SubscriptionMode.NEW, "from_beginning": SubscriptionMode.ALL},
        ),
        "Where a new consumer group starts when its pop doesn't say.",
        default="new",
    )
    max_bytes: int = setting(
        "QUEEN_POP_MAX_BYTES",
        Integer(1024, 2 * GIB),
        "Largest answer of a pop; one message is always delivered.",
        default="16777216",
        unit="bytes",
    )


@attrs.frozen
class AdmissionBand:
    """Least and most write transactions that the arbiter admits at once."""

    lo: int
    hi: int


@attrs.frozen(kw_only=True)
class FlowConfig:
    """The admission arbiter (spec 4)."""

    pool_reserve: int = setting(
        "QUEEN_ADMISSION_POOL_RESERVE",
        Integer(0, 10_000),
        "Connections of the pool that write transactions leave alone.",
        default="16",
    )
    admission_min: int | None = optional(
        "QUEEN_ADMISSION_MIN",
        Integer(1, 10_000),
        "Raises the lower end of the band that follows from the pool.",
    )
    admission_max: int | None = optional(
        "QUEEN_ADMISSION_MAX",
        Integer(1, 10_000),
        "Lowers its upper end.",
    )
    tick_ms: int = setting(
        "QUEEN_ADMISSION_TICK_MS",
        Integer(10, MINUTE_MS),
        "Interval of the steps by which the budget adapts.",
        default="500",
        unit="ms",
    )
    train_gap_us: int = setting(
        "QUEEN_ADMISSION_TRAIN_GAP_US",
        Integer(1, 1_000_000),
        "Commits that complete closer than this shared one WAL flush.",
        default="300",
        unit="µs",
    )

    def admission_band(self, pool_size: int) -> AdmissionBand:
        """The band for a pool of that size, narrowed as asked; its ends never cross (spec 4)."""
        hi = max(ADMISSION_FLOOR, pool_size - self.pool_reserve)
        lo = max(ADMISSION_FLOOR, hi * 2 // 3)
        if self.admission_max is not None:
            hi = min(hi, self.admission_max)
        if self.admission_min is not None:
            lo = max(lo, self.admission_min)
        return AdmissionBand(min(lo, hi), hi)


@attrs.frozen(kw_only=True)
class JobsConfig:
    """Cadence of the background jobs (spec 4)."""

    retention_interval_ms: int = setting(
        "RETENTION_INTERVAL",
        Integer(10, DAY_MS),
        "Cadence of retention, eviction and partition cleanup.",
        default="5000",
        unit="ms",
    )
    partition_cleanup_days: int = setting(
        "PARTITION_CLEANUP_DAYS",
        Integer(1, 36_500),
        "Age at which an empty, idle partition is deleted.",
        default="30",
        unit="days",
    )
    stats_interval_ms: int = setting(
        "STATS_INTERVAL_MS",
        Integer(10, DAY_MS),
        "Cadence of the statistics reconciler.",
        default="10000",
        unit="ms",
    )
    metrics_flush_ms: int = setting(
        "METRICS_FLUSH_MS",
        Integer(10, DAY_MS),
        "Cadence at which a broker writes its metrics to PostgreSQL.",
        default="60000",
        unit="ms",
    )
    cache_refresh_ms: int = setting(
        "QUEEN_CACHE_REFRESH_INTERVAL_MS",
        Integer(10, DAY_MS),
        "Cadence at which flags and queue configuration are read again.",
        default="60000",
        unit="ms",
    )
    hotlist: bool = setting(
        "QUEEN_HOTLIST",
        Boolean(),
        "Keep a list in memory of the partitions that have messages.",
        default="true",
    )
