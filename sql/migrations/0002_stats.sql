-- What status, analytics and a dashboard read: counters by minute, written by every broker's metrics
-- flush, and samples of consumer lag, written by the reconciler and by POST /api/v1/stats/refresh.
-- Nothing of the delivery depends on them; they may be emptied at any time.

-- What one broker process did in one minute. The gauges (parked_pops and after) are those of the last flush.
CREATE TABLE queen.worker_metrics (
    bucket_at       timestamptz NOT NULL,
    server_id       text NOT NULL,
    push_calls      bigint NOT NULL DEFAULT 0,
    pushed          bigint NOT NULL DEFAULT 0,
    pop_calls       bigint NOT NULL DEFAULT 0,
    empty_pops      bigint NOT NULL DEFAULT 0,
    popped          bigint NOT NULL DEFAULT 0,
    ack_calls       bigint NOT NULL DEFAULT 0,
    completed       bigint NOT NULL DEFAULT 0,
    failed          bigint NOT NULL DEFAULT 0,
    dead_lettered   bigint NOT NULL DEFAULT 0,
    database_errors bigint NOT NULL DEFAULT 0,
    cpu_ms          bigint NOT NULL DEFAULT 0,
    rss_bytes       bigint NOT NULL DEFAULT 0,
    parked_pops     bigint NOT NULL DEFAULT 0,
    pool_open       bigint NOT NULL DEFAULT 0,
    pool_in_use     bigint NOT NULL DEFAULT 0,
    pool_waiting    bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (bucket_at, server_id)
);

-- Messages pushed and popped in one minute, by queue, over all brokers. No foreign key: the history of a
-- deleted queue stays readable.
CREATE TABLE queen.stats (
    tenant_id  uuid NOT NULL DEFAULT '00000000-0000-0000-0000-000000000001',
    bucket_at  timestamptz NOT NULL,
    queue_name text NOT NULL,
    pushed     bigint NOT NULL DEFAULT 0,
    popped     bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (tenant_id, bucket_at, queue_name)
);
CREATE INDEX stats_queue ON queen.stats (tenant_id, queue_name, bucket_at);

-- The last sample of a minute of what a group owes in a queue.
CREATE TABLE queen.queue_lag_metrics (
    tenant_id        uuid NOT NULL DEFAULT '00000000-0000-0000-0000-000000000001',
    bucket_at        timestamptz NOT NULL,
    queue_name       text NOT NULL,
    consumer_group   text NOT NULL,
    lag              bigint NOT NULL,
    time_lag_seconds double precision NOT NULL,
    PRIMARY KEY (tenant_id, bucket_at, queue_name, consumer_group)
);
