-- Traces: notes of consumers on messages, found by message or by name.

-- Store a trace under names that differ; NULL when there is no such partition.
CREATE OR REPLACE FUNCTION queen.trace_v1(
    p_tenant uuid, p_partition uuid, p_transaction text, p_group text, p_names text[], p_type text,
    p_data text)
RETURNS uuid LANGUAGE plpgsql AS $$
DECLARE
    v_id uuid;
    v_at timestamptz;
BEGIN
    INSERT INTO queen.message_traces (partition_id, transaction_id, consumer_group, event_type, data)
    SELECT p.id, p_transaction, p_group, p_type, p_data
      FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id
     WHERE p.id = p_partition AND q.tenant_id = p_tenant
       FOR KEY SHARE OF p
 RETURNING id, created_at INTO v_id, v_at;
    IF v_id IS NOT NULL THEN
        INSERT INTO queen.message_trace_names (trace_id, tenant_id, name, created_at)
        SELECT v_id, p_tenant, n.name, v_at FROM unnest(p_names) AS n(name);
    END IF;
    RETURN v_id;
END $$;

-- Traces of one message (oldest first, as things happened) or of one name (newest first), created in
-- [p_from, p_to). A page ends early where its data would pass p_max_bytes; one row always fits.
CREATE OR REPLACE FUNCTION queen.traces_of_message_v1(
    p_tenant uuid, p_partition uuid, p_transaction text, p_limit bigint, p_offset bigint,
    p_max_bytes bigint)
RETURNS TABLE (id uuid, queue_name text, partition_name text, partition_id uuid, transaction_id text,
               consumer_group text, event_type text, names text[], data text, created_at timestamptz)
LANGUAGE sql STABLE AS $$
    WITH page AS (
        SELECT t.id, t.created_at, octet_length(t.data)::bigint AS bytes
          FROM queen.message_traces t
         WHERE t.partition_id = p_partition AND t.transaction_id = p_transaction
         ORDER BY t.created_at, t.id LIMIT p_limit OFFSET p_offset
    ), bounded AS (
        SELECT g.id, sum(g.bytes) OVER (ORDER BY g.created_at, g.id) - g.bytes AS before FROM page g
    )
    SELECT t.id, q.name, p.name, t.partition_id, t.transaction_id, t.consumer_group, t.event_type,
           ARRAY(SELECT n.name FROM queen.message_trace_names n WHERE n.trace_id = t.id ORDER BY n.name),
           t.data, t.created_at
      FROM bounded b
      JOIN queen.message_traces t ON t.id = b.id
      JOIN queen.log_partitions p ON p.id = t.partition_id
      JOIN queen.queues q ON q.id = p.queue_id AND q.tenant_id = p_tenant
     WHERE b.before < p_max_bytes
     ORDER BY t.created_at, t.id
$$;

CREATE OR REPLACE FUNCTION queen.traces_of_name_v1(
    p_tenant uuid, p_name text, p_from timestamptz, p_to timestamptz, p_limit bigint, p_offset bigint,
    p_max_bytes bigint)
RETURNS TABLE (id uuid, queue_name text, partition_name text, partition_id uuid, transaction_id text,
               consumer_group text, event_type text, names text[], data text, created_at timestamptz)
LANGUAGE sql STABLE AS $$
    WITH page AS (
        SELECT n.trace_id, n.created_at
          FROM queen.message_trace_names n
         WHERE n.tenant_id = p_tenant AND n.name = p_name
           AND (p_from IS NULL OR n.created_at >= p_from) AND (p_to IS NULL OR n.created_at < p_to)
         ORDER BY n.created_at DESC, n.trace_id DESC LIMIT p_limit OFFSET p_offset
    ), bounded AS (
        SELECT t.id, sum(octet_length(t.data)::bigint) OVER (ORDER BY t.created_at DESC, t.id DESC)
                     - octet_length(t.data) AS before
          FROM page g JOIN queen.message_traces t ON t.id = g.trace_id
    )
    SELECT t.id, q.name, p.name, t.partition_id, t.transaction_id, t.consumer_group, t.event_type,
           ARRAY(SELECT n.name FROM queen.message_trace_names n WHERE n.trace_id = t.id ORDER BY n.name),
           t.data, t.created_at
      FROM bounded b
      JOIN queen.message_traces t ON t.id = b.id
      JOIN queen.log_partitions p ON p.id = t.partition_id
      JOIN queen.queues q ON q.id = p.queue_id
     WHERE b.before < p_max_bytes
     ORDER BY t.created_at DESC, t.id DESC
$$;

CREATE OR REPLACE FUNCTION queen.count_traces_v1(
    p_tenant uuid, p_name text, p_from timestamptz, p_to timestamptz)
RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT count(*) FROM queen.message_trace_names n
     WHERE n.tenant_id = p_tenant AND n.name = p_name
       AND (p_from IS NULL OR n.created_at >= p_from) AND (p_to IS NULL OR n.created_at < p_to)
$$;

-- Names with how many traces each has, the one used last first; those that contain p_search, in any case.
CREATE OR REPLACE FUNCTION queen.trace_names_v1(
    p_tenant uuid, p_search text, p_limit bigint, p_offset bigint)
RETURNS TABLE (name text, traces bigint, last_at timestamptz) LANGUAGE sql STABLE AS $$
    SELECT n.name, count(*), max(n.created_at)
      FROM queen.message_trace_names n
     WHERE n.tenant_id = p_tenant
       AND (p_search IS NULL OR strpos(lower(n.name), lower(p_search)) > 0)
     GROUP BY n.name
     ORDER BY max(n.created_at) DESC, n.name
     LIMIT p_limit OFFSET p_offset
$$;

CREATE OR REPLACE FUNCTION queen.count_trace_names_v1(p_tenant uuid, p_search text)
RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT count(DISTINCT n.name) FROM queen.message_trace_names n
     WHERE n.tenant_id = p_tenant
       AND (p_search IS NULL OR strpos(lower(n.name), lower(p_search)) > 0)
$$;

-- Delete up to p_most traces older than p_before, with their names; returns how many it deleted.
CREATE OR REPLACE FUNCTION queen.purge_traces_v1(p_before timestamptz, p_most bigint)
RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_count bigint;
BEGIN
    DELETE FROM queen.message_traces t WHERE t.id = ANY (ARRAY(
        SELECT o.id FROM queen.message_traces o WHERE o.created_at < p_before
         ORDER BY o.created_at LIMIT p_most));
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END $$;
