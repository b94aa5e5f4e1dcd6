-- Streams: queries that the client's streaming engine runs, and what they remember between two cycles.
CREATE SCHEMA queen_streams;

-- config_hash stands for the operators of a query: state of one set of them means nothing to another.
CREATE TABLE queen_streams.queries (
    id           uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    tenant_id    uuid NOT NULL DEFAULT '00000000-0000-0000-0000-000000000001',
    name         text NOT NULL,
    source_queue text,
    sink_queue   text,
    config_hash  text NOT NULL,
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (tenant_id, name)
);

-- A query in one partition of its source. A cycle locks its row, so cycles of one shard follow each other;
-- last_cycle tells a broker whose commit was left unknown that it had arrived.
CREATE TABLE queen_streams.shards (
    query_id      uuid NOT NULL REFERENCES queen_streams.queries (id) ON DELETE CASCADE,
    partition_id  uuid NOT NULL REFERENCES queen.log_partitions (id) ON DELETE CASCADE,
    last_cycle    uuid NOT NULL,
    last_cycle_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    cycles        bigint NOT NULL DEFAULT 1,
    PRIMARY KEY (query_id, partition_id)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
        autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 2000, vacuum_truncate = off);
CREATE INDEX shards_partition ON queen_streams.shards (partition_id);

-- key is JSON text in a canonical form, as bytes: these sort by prefix whatever the database's collation.
-- value is the verbatim JSON. ripe_at is the number in its windowEnd, if it is an object with one.
CREATE TABLE queen_streams.state (
    query_id     uuid NOT NULL,
    partition_id uuid NOT NULL,
    key          bytea NOT NULL,
    value        text NOT NULL,
    ripe_at      double precision,
    PRIMARY KEY (query_id, partition_id, key),
    FOREIGN KEY (query_id, partition_id) REFERENCES queen_streams.shards ON DELETE CASCADE
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
        autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 2000, vacuum_truncate = off);
CREATE INDEX state_ripe ON queen_streams.state (query_id, partition_id, ripe_at) WHERE ripe_at IS NOT NULL;
