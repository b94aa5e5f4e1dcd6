-- Cursor moves that are no acks (seek, deletion of a group): every broker's hot-list must look again. Short-lived.
CREATE TABLE queen.log_repairs (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id  uuid NOT NULL,
    queue_name text NOT NULL,
    moved_at   timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX log_repairs_moved_at ON queen.log_repairs (moved_at);
