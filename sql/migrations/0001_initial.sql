-- The tables of spec 1. A message's address is a bigint offset, dense inside its partition; a segment
-- row holds many messages; a group's progress in a partition is one integer.
-- Released migrations are never edited: what changes comes as a new file.

CREATE TABLE queen.queues (
    id                          uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    tenant_id                   uuid NOT NULL DEFAULT '00000000-0000-0000-0000-000000000001',
    name                        text NOT NULL,
    namespace                   text NOT NULL DEFAULT '',
    task                        text NOT NULL DEFAULT '',
    lease_time                  integer NOT NULL DEFAULT 60,
    retry_limit                 integer NOT NULL DEFAULT 3,
    dead_letter_queue           boolean NOT NULL DEFAULT true,
    dlq_after_max_retries       boolean NOT NULL DEFAULT true,
    delayed_processing          integer NOT NULL DEFAULT 0,
    window_buffer               integer NOT NULL DEFAULT 0,
    min_pop_wait_time           integer NOT NULL DEFAULT 0,
    retention_enabled           boolean NOT NULL DEFAULT false,
    retention_seconds           integer NOT NULL DEFAULT 0,
    completed_retention_seconds integer NOT NULL DEFAULT 0,
    max_wait_time_seconds       integer NOT NULL DEFAULT 0,
    encryption_enabled          boolean NOT NULL DEFAULT false,
    dedup_window_seconds        integer NOT NULL DEFAULT 3600,
    -- Stored and echoed, without an effect here.
    priority                    integer NOT NULL DEFAULT 0,
    ttl                         integer NOT NULL DEFAULT 0,
    max_size                    integer NOT NULL DEFAULT 0,
    retry_delay                 integer NOT NULL DEFAULT 0,
    created_at                  timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (tenant_id, name)
);
CREATE INDEX queues_namespace_task ON queen.queues (tenant_id, namespace, task);

-- last_offset and last_created_at move with every push and are in no index, so that those updates stay
-- HOT; last_write_at is indexed and so moves at most once a second; oldest_* change only when a
-- partition gets its first live segment, and by retention.
CREATE TABLE queen.log_partitions (
    id              uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    queue_id        uuid NOT NULL REFERENCES queen.queues (id) ON DELETE CASCADE,
    name            text NOT NULL DEFAULT 'Default',
    last_offset     bigint NOT NULL DEFAULT -1,
    log_start       bigint NOT NULL DEFAULT 0,
    txns_start      bigint NOT NULL DEFAULT 0,
    last_created_at timestamptz NOT NULL DEFAULT '-infinity',
    last_write_at   timestamptz NOT NULL DEFAULT '-infinity',
    oldest_live_at  timestamptz,
    oldest_txn_at   timestamptz,
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (queue_id, name)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
        autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 2000, vacuum_truncate = off);
CREATE INDEX log_partitions_last_write ON queen.log_partitions (last_write_at);
-- What retention, sidecar purge and clean-up look for. No column of theirs moves with a push, except the
-- first one into an empty partition.
CREATE INDEX log_partitions_oldest_live ON queen.log_partitions (queue_id, oldest_live_at)
    WHERE oldest_live_at IS NOT NULL;
CREATE INDEX log_partitions_oldest_txn ON queen.log_partitions (oldest_txn_at) WHERE txns_start < log_start;
CREATE INDEX log_partitions_empty ON queen.log_partitions (last_write_at) WHERE oldest_live_at IS NULL;

-- raw_bytes is the size of the decompressed blob: a pop bounds its answer with it.
CREATE TABLE queen.log_segments (
    partition_id uuid NOT NULL REFERENCES queen.log_partitions (id) ON DELETE CASCADE,
    base_offset  bigint NOT NULL,
    end_offset   bigint NOT NULL,
    raw_bytes    integer NOT NULL,
    created_at   timestamptz NOT NULL,
    blob         bytea NOT NULL,
    PRIMARY KEY (partition_id, base_offset),
    CHECK (end_offset >= base_offset)
);
ALTER TABLE queen.log_segments ALTER COLUMN blob SET STORAGE EXTERNAL;

-- 16 bytes a message, in offset order: BLAKE2b-128 of its transactionId. No foreign key: whoever deletes
-- a partition deletes these too.
CREATE TABLE queen.log_txns (
    partition_id uuid NOT NULL,
    base_offset  bigint NOT NULL,
    end_offset   bigint NOT NULL,
    created_at   timestamptz NOT NULL,
    hashes       bytea NOT NULL,
    PRIMARY KEY (partition_id, base_offset),
    CHECK (octet_length(hashes) = 16 * (end_offset - base_offset + 1))
);
ALTER TABLE queen.log_txns ALTER COLUMN hashes SET STORAGE EXTERNAL;

-- The leased batch is (committed, batch_end]; batch_end NULL means no lease. batch_retry_count counts the
-- claims since the batch was last completed; attempt_* count the failures charged to one offset.
CREATE TABLE queen.log_consumers (
    partition_id      uuid NOT NULL REFERENCES queen.log_partitions (id) ON DELETE CASCADE,
    consumer_group    text NOT NULL,
    committed         bigint NOT NULL DEFAULT -1,
    batch_end         bigint,
    worker_id         text,
    lease_expires_at  timestamptz,
    lease_acquired_at timestamptz,
    batch_retry_count integer NOT NULL DEFAULT 0,
    attempt_offset    bigint,
    attempt_count     integer NOT NULL DEFAULT 0,
    total_consumed    bigint NOT NULL DEFAULT 0,
    created_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (partition_id, consumer_group)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
        autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 2000, vacuum_truncate = off);
CREATE INDEX log_consumers_lease ON queen.log_consumers (worker_id) WHERE worker_id IS NOT NULL;
-- Both columns, so that a plan made on a tiny table can pick neither index wrongly.
CREATE INDEX log_consumers_group ON queen.log_consumers (consumer_group, partition_id);

-- No foreign key: a dead letter outlives its partition's retention. payload is text, the verbatim JSON.
CREATE TABLE queen.log_dlq (
    id             uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    tenant_id      uuid NOT NULL DEFAULT '00000000-0000-0000-0000-000000000001',
    queue_name     text NOT NULL,
    partition_name text NOT NULL,
    partition_id   uuid NOT NULL,
    consumer_group text NOT NULL,
    "offset"       bigint NOT NULL,
    message_id     text NOT NULL,
    transaction_id text NOT NULL,
    trace_id       text,
    producer_sub   text,
    payload        text NOT NULL,
    error          text,
    retry_count    integer NOT NULL DEFAULT 0,
    created_at     timestamptz,
    failed_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (partition_id, consumer_group, "offset")
);
CREATE INDEX log_dlq_queue ON queen.log_dlq (tenant_id, queue_name, failed_at);

-- A group's subscription point. Keyed by name, not by queue id: it is stored before the queue exists.
-- Discovery subscriptions have queue_name '' and a namespace or task.
CREATE TABLE queen.consumer_groups_metadata (
    tenant_id              uuid NOT NULL DEFAULT '00000000-0000-0000-0000-000000000001',
    queue_name             text NOT NULL DEFAULT '',
    namespace              text NOT NULL DEFAULT '',
    task                   text NOT NULL DEFAULT '',
    consumer_group         text NOT NULL,
    subscription_mode      text NOT NULL,
    subscription_timestamp timestamptz NOT NULL,
    created_at             timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant_id, consumer_group, queue_name, namespace, task)
);

CREATE TABLE queen.system_state (
    key        text PRIMARY KEY,
    value      jsonb NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
