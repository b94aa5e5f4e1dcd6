-- What the schema apply itself needs; runs when the database has no schema queen yet.
CREATE SCHEMA IF NOT EXISTS queen;

CREATE TABLE queen.schema_version (
    version    integer PRIMARY KEY,
    name       text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- One row: the checksum of the functions as they were last applied.
CREATE TABLE queen.schema_functions (
    single   boolean PRIMARY KEY DEFAULT true CHECK (single),
    checksum text NOT NULL
);
