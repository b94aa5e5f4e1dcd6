-- Messages as an operator looks at them: one by its address, or the newest that match.

-- The newest offset of a partition whose transactionId has this hash, as far back as the sidecar reaches;
-- NULL when there is none. Reads 16 bytes a message, newest first, until it finds one.
-- (position() may also hit across two hashes, once in 2^128 bytes.)
CREATE OR REPLACE FUNCTION queen.offset_of_hash_v1(p_partition uuid, p_hash bytea)
RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT t.base_offset + (SELECT max(g) FROM generate_series(0, (t.end_offset - t.base_offset)::integer) g
                             WHERE substring(t.hashes FROM g * 16 + 1 FOR 16) = p_hash)
      FROM queen.log_txns t
     WHERE t.partition_id = p_partition AND position(p_hash IN t.hashes) > 0
     ORDER BY t.base_offset DESC LIMIT 1
$$;

-- What a message is to a group: p_committed NULL means that the group has no cursor in the partition.
CREATE OR REPLACE FUNCTION queen.message_status_v1(
    p_offset bigint, p_committed bigint, p_leased_to bigint, p_is_dead boolean)
RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_is_dead THEN 'dead_letter'
                WHEN p_offset <= p_committed THEN 'completed'
                WHEN p_offset <= p_leased_to THEN 'processing'
                ELSE 'pending' END
$$;

-- The newest message with that hash, and the segment that holds it. No row: none, or retention has it.
CREATE OR REPLACE FUNCTION queen.message_v1(p_tenant uuid, p_partition uuid, p_hash bytea)
RETURNS TABLE (queue_name text, partition_name text, message_offset bigint, base_offset bigint,
               created_at timestamptz, blob bytea)
LANGUAGE sql STABLE AS $$
    SELECT q.name, p.name, s.message_offset, s.base_offset, s.created_at, s.blob
      FROM queen.log_partitions p
      JOIN queen.queues q ON q.id = p.queue_id
     CROSS JOIN LATERAL queen.segments_at_v1(p.id, ARRAY[queen.offset_of_hash_v1(p.id, p_hash)]) s
     WHERE p.id = p_partition AND q.tenant_id = p_tenant
$$;

-- What each group has done with one message: all that have a cursor in its partition or its dead letter.
CREATE OR REPLACE FUNCTION queen.message_groups_v1(p_tenant uuid, p_partition uuid, p_offset bigint)
RETURNS TABLE (consumer_group text, status text, consumed boolean, lease_expires_at timestamptz,
               error text, retry_count integer, failed_at timestamptz)
LANGUAGE sql STABLE AS $$
    SELECT coalesce(c.consumer_group, d.consumer_group),
           queen.message_status_v1(p_offset, c.committed, c.leased_to, d.id IS NOT NULL),
           coalesce(p_offset <= c.committed, false),
           CASE WHEN p_offset > c.committed AND p_offset <= c.leased_to THEN c.lease_expires_at END,
           d.error, d.retry_count, d.failed_at
      FROM (SELECT l.consumer_group, l.committed, l.lease_expires_at,
                   CASE WHEN l.lease_expires_at > clock_timestamp() THEN l.batch_end END AS leased_to
              FROM queen.log_consumers l WHERE l.partition_id = p_partition) c
      FULL JOIN (SELECT * FROM queen.log_dlq l
                  WHERE l.tenant_id = p_tenant AND l.partition_id = p_partition AND l."offset" = p_offset) d
        ON d.consumer_group = c.consumer_group
     ORDER BY 1
$$;

-- A page of messages, newest first, as the segments that hold them: offsets and statuses are aligned. What
-- is NULL matches all; p_status is judged for p_group; created in [p_from, p_to), by default within the last
-- hour of that. The page ends early where its segments would pass p_max_bytes decompressed; one always fits.
--
-- The work is bounded by p_limit + p_offset messages a partition, whatever the history: where a window or
-- a status starts is looked up (first_offset_since_v1, the cursor), dead letters lead to their segments.
CREATE OR REPLACE FUNCTION queen.list_messages_v1(
    p_tenant uuid, p_queue text, p_partition text, p_namespace text, p_task text, p_group text,
    p_status text, p_from timestamptz, p_to timestamptz, p_limit bigint, p_offset bigint,
    p_max_bytes bigint)
RETURNS TABLE (queue_name text, partition_name text, partition_id uuid, base_offset bigint,
               created_at timestamptz, offsets bigint[], statuses text[], blob bytea)
LANGUAGE sql STABLE SET jit = off AS $$    -- compiling it would take a second, running it milliseconds
    WITH parts AS MATERIALIZED (
        SELECT q.name AS queue_name, p.name AS partition_name, p.id, c.committed, c.leased_to,
               -- The offsets that can have this status and were created in the window.
               greatest(p.log_start, queen.first_offset_since_v1(p.id, w.since),
                        CASE p_status WHEN 'pending' THEN greatest(c.committed, c.leased_to) + 1
                                      WHEN 'processing' THEN c.committed + 1 END) AS low,
               least(CASE WHEN p_to IS NULL THEN p.last_offset
                          ELSE queen.first_offset_since_v1(p.id, p_to) - 1 END,
                     CASE p_status WHEN 'completed' THEN coalesce(c.committed, -1)
                                   WHEN 'processing' THEN coalesce(c.leased_to, -1) END) AS high
          FROM queen.queues q
          JOIN queen.log_partitions p ON p.queue_id = q.id
         CROSS JOIN (SELECT coalesce(p_from, coalesce(p_to, clock_timestamp()) - interval '1 hour') AS since) w
          LEFT JOIN LATERAL (
                SELECT l.committed,
                       CASE WHEN l.lease_expires_at > clock_timestamp() THEN l.batch_end END AS leased_to
                  FROM queen.log_consumers l
                 WHERE l.partition_id = p.id AND l.consumer_group = p_group) c ON true
         WHERE q.tenant_id = p_tenant
           AND (p_queue IS NULL OR q.name = p_queue)
           AND (p_partition IS NULL OR p.name = p_partition)
           AND (p_namespace IS NULL OR q.namespace = p_namespace)
           AND (p_task IS NULL OR q.task = p_task)
           AND p.last_offset >= p.log_start
           AND p.last_created_at >= w.since
         -- Without more conditions each of these has a match: the page lies in those written last.
         ORDER BY p.last_created_at DESC, p.id
         LIMIT CASE WHEN p_status IS NULL AND p_to IS NULL THEN p_limit + p_offset END
    ), page AS (
        SELECT p.queue_name, p.partition_name, p.id, m.*
          FROM parts p
         CROSS JOIN LATERAL (
            (SELECT s.base_offset, s.created_at, s.raw_bytes, o.message_offset, t.status
               FROM queen.log_segments s
              CROSS JOIN LATERAL generate_series(least(s.end_offset, p.high), greatest(s.base_offset, p.low),
                                                 -1) AS o(message_offset)
              CROSS JOIN LATERAL (SELECT queen.message_status_v1(
                        o.message_offset, p.committed, p.leased_to,
                        EXISTS (SELECT FROM queen.log_dlq d
                                 WHERE d.partition_id = p.id AND d.consumer_group = p_group
                                   AND d."offset" = o.message_offset)) AS status) t
              WHERE p_status IS DISTINCT FROM 'dead_letter'
                AND s.partition_id = p.id AND s.base_offset <= p.high
                AND s.base_offset >= coalesce(
                        (SELECT f.base_offset FROM queen.log_segments f
                          WHERE f.partition_id = p.id AND f.base_offset <= p.low
                          ORDER BY f.base_offset DESC LIMIT 1), p.low)
                AND (p_status IS NULL OR t.status = p_status)
              ORDER BY s.base_offset DESC, o.message_offset DESC
              LIMIT p_limit + p_offset)
            UNION ALL
            (SELECT s.base_offset, s.created_at, s.raw_bytes, d."offset", 'dead_letter'
               FROM queen.log_dlq d
              CROSS JOIN LATERAL (
                    SELECT f.* FROM queen.log_segments f
                     WHERE f.partition_id = p.id AND f.base_offset <= d."offset"
                     ORDER BY f.base_offset DESC LIMIT 1) s
              WHERE p_status = 'dead_letter'
                AND d.partition_id = p.id AND d.consumer_group = p_group
                AND d."offset" BETWEEN p.low AND p.high AND s.end_offset >= d."offset"
              ORDER BY d."offset" DESC
              LIMIT p_limit + p_offset)) m
         ORDER BY m.created_at DESC, p.id, m.message_offset DESC
         LIMIT p_limit OFFSET p_offset
    ), needed AS (
        SELECT g.queue_name, g.partition_name, g.id, g.base_offset, g.created_at, g.raw_bytes,
               array_agg(g.message_offset ORDER BY g.message_offset DESC) AS offsets,
               array_agg(g.status ORDER BY g.message_offset DESC) AS statuses
          FROM page g GROUP BY 1, 2, 3, 4, 5, 6
    ), bounded AS (
        SELECT n.*, sum(n.raw_bytes) OVER (ORDER BY n.created_at DESC, n.id, n.base_offset DESC)
                    - n.raw_bytes AS before
          FROM needed n
    )
    SELECT b.queue_name, b.partition_name, b.id, b.base_offset, b.created_at, b.offsets, b.statuses, s.blob
      FROM bounded b
      JOIN queen.log_segments s ON s.partition_id = b.id AND s.base_offset = b.base_offset
     WHERE b.before < p_max_bytes
     ORDER BY b.created_at DESC, b.id, b.base_offset DESC
$$;
