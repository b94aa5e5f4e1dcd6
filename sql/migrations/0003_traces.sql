-- Traces: what consumers noted down about a message while they worked on it.

-- They go with their partition: by the foreign key, which also keeps one that is just being deleted from
-- getting new ones. data is text, the verbatim JSON.
CREATE TABLE queen.message_traces (
    id             uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    partition_id   uuid NOT NULL REFERENCES queen.log_partitions (id) ON DELETE CASCADE,
    transaction_id text NOT NULL,
    consumer_group text NOT NULL,
    event_type     text NOT NULL,
    data           text NOT NULL,
    created_at     timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX message_traces_message ON queen.message_traces (partition_id, transaction_id, created_at);
CREATE INDEX message_traces_created ON queen.message_traces (created_at);

-- The names under which a trace is found again: those of a workflow, across queues.
CREATE TABLE queen.message_trace_names (
    trace_id   uuid NOT NULL REFERENCES queen.message_traces (id) ON DELETE CASCADE,
    tenant_id  uuid NOT NULL,
    name       text NOT NULL,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (trace_id, name)
);
CREATE INDEX message_trace_names_name ON queen.message_trace_names (tenant_id, name, created_at);
