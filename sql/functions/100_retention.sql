-- Retention (spec 4, spec 8.1, 8.2): whole segments, one partition's lock at a time, in short steps. A
-- queue's rules are ages: retentionSeconds (needs retentionEnabled) and maxWaitTimeSeconds (does not),
-- whatever the cursors say; completedRetentionSeconds (needs retentionEnabled) only below the lowest
-- cursor, and only where some group has one.
--
-- created_at is monotone in the offset (spec 1, invariant 1), so what has expired is a prefix of the log.
-- What is compared with an index is now(), not clock_timestamp(): no index serves a volatile function. The
-- walks also forbid sorts, so that whatever the statistics say they are read in the index's order.

-- The age from which messages of a queue go whatever the cursors say; NULL: never.
CREATE OR REPLACE FUNCTION queen.retention_age_v1(p_queue queen.queues)
RETURNS integer LANGUAGE sql IMMUTABLE AS $$
    SELECT least(CASE WHEN p_queue.retention_enabled THEN nullif(p_queue.retention_seconds, 0) END,
                 nullif(p_queue.max_wait_time_seconds, 0))
$$;

-- The age from which completed messages of a queue go; NULL: never.
CREATE OR REPLACE FUNCTION queen.completed_age_v1(p_queue queen.queues)
RETURNS integer LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_queue.retention_enabled THEN nullif(p_queue.completed_retention_seconds, 0) END
$$;

-- How long a sidecar row is kept after its segment is gone.
CREATE OR REPLACE FUNCTION queen.sidecar_age_v1(p_queue queen.queues)
RETURNS integer LANGUAGE sql IMMUTABLE AS $$
    SELECT greatest(p_queue.dedup_window_seconds, coalesce(queen.completed_age_v1(p_queue), 0), 900)
$$;

-- Queues with a rule, and the least age that any of it names.
CREATE OR REPLACE FUNCTION queen.retention_queues_v1()
RETURNS TABLE (queue_id uuid, age_seconds integer) LANGUAGE sql STABLE AS $$
    SELECT q.id, least(queen.retention_age_v1(q), queen.completed_age_v1(q))
      FROM queen.queues q
     WHERE least(queen.retention_age_v1(q), queen.completed_age_v1(q)) IS NOT NULL
$$;

-- Partitions of a queue whose oldest message has reached that age, oldest first, after the place where
-- an earlier call ended: what no cursor has passed yet must not be looked at in every cycle. due: there
-- is something to delete.
CREATE OR REPLACE FUNCTION queen.retention_candidates_v1(
    p_queue uuid, p_age_seconds bigint, p_after_at timestamptz, p_after_id uuid, p_most bigint)
RETURNS TABLE (partition_id uuid, oldest_live_at timestamptz, due boolean)
LANGUAGE sql STABLE SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
    SELECT p.id, p.oldest_live_at,
           coalesce(p.oldest_live_at < now() - make_interval(secs => queen.retention_age_v1(q)), false)
           OR coalesce((SELECT min(c.committed) FROM queen.log_consumers c WHERE c.partition_id = p.id)
                       >= (SELECT s.end_offset FROM queen.log_segments s WHERE s.partition_id = p.id
                            ORDER BY s.base_offset LIMIT 1), false)
      FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id
     WHERE p.queue_id = p_queue AND p.oldest_live_at IS NOT NULL
       AND p.oldest_live_at < now() - make_interval(secs => p_age_seconds)
       AND (p.oldest_live_at, p.id) > (p_after_at, p_after_id)
     ORDER BY p.oldest_live_at, p.id
     LIMIT p_most
$$;

-- Delete up to p_most expired segments of a partition; returns how many, and how many messages.
CREATE OR REPLACE FUNCTION queen.trim_partition_v1(p_partition uuid, p_most bigint)
RETURNS TABLE (segments bigint, messages bigint) LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_now    timestamptz := clock_timestamp();
    v_part   queen.log_partitions;
    v_queue  queen.queues;
    v_passed bigint;
    v_end    bigint;
BEGIN
    segments := 0;
    messages := 0;
    SELECT * INTO v_part FROM queen.log_partitions p WHERE p.id = p_partition FOR NO KEY UPDATE;
    SELECT * INTO v_queue FROM queen.queues q WHERE q.id = v_part.queue_id;
    SELECT min(c.committed) INTO v_passed FROM queen.log_consumers c WHERE c.partition_id = p_partition;
    SELECT max(s.end_offset) INTO v_end
      FROM (SELECT s.end_offset, s.created_at FROM queen.log_segments s WHERE s.partition_id = p_partition
             ORDER BY s.base_offset LIMIT p_most) s
     WHERE s.created_at < v_now - make_interval(secs => queen.retention_age_v1(v_queue))
        OR (s.created_at < v_now - make_interval(secs => queen.completed_age_v1(v_queue))
            AND s.end_offset <= v_passed);
    IF v_end IS NOT NULL THEN
        DELETE FROM queen.log_segments s WHERE s.partition_id = p_partition AND s.base_offset <= v_end;
        GET DIAGNOSTICS segments = ROW_COUNT;
        messages := v_end + 1 - v_part.log_start;
        UPDATE queen.log_partitions p
           SET log_start = v_end + 1,
               oldest_live_at = (SELECT s.created_at FROM queen.log_segments s
                                  WHERE s.partition_id = p_partition ORDER BY s.base_offset LIMIT 1)
         WHERE p.id = p_partition;
    END IF;
    RETURN NEXT;
END $$;

-- Partitions with sidecar rows whose segments are gone, oldest first, after the place where an earlier call
-- ended. due: the oldest row is old enough to go.
CREATE OR REPLACE FUNCTION queen.purge_candidates_v1(p_after_at timestamptz, p_after_id uuid, p_most bigint)
RETURNS TABLE (partition_id uuid, oldest_txn_at timestamptz, due boolean)
LANGUAGE sql STABLE SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
    SELECT p.id, p.oldest_txn_at, p.oldest_txn_at < now() - make_interval(secs => queen.sidecar_age_v1(q))
      FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id
     WHERE p.txns_start < p.log_start
       AND p.oldest_txn_at < now() - interval '900 seconds'    -- the least that sidecar_age_v1 gives
       AND (p.oldest_txn_at, p.id) > (p_after_at, p_after_id)
     ORDER BY p.oldest_txn_at, p.id
     LIMIT p_most
$$;

-- Delete up to p_most sidecar rows of a partition whose segment is gone (spec 8.1); returns how many.
CREATE OR REPLACE FUNCTION queen.purge_sidecar_v1(p_partition uuid, p_most bigint)
RETURNS bigint LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_part   queen.log_partitions;
    v_before timestamptz;
    v_end    bigint;
    v_count  bigint;
BEGIN
    SELECT * INTO v_part FROM queen.log_partitions p WHERE p.id = p_partition FOR NO KEY UPDATE;
    SELECT clock_timestamp() - make_interval(secs => queen.sidecar_age_v1(q)) INTO v_before
      FROM queen.queues q WHERE q.id = v_part.queue_id;
    SELECT max(t.end_offset) INTO v_end
      FROM (SELECT t.end_offset, t.created_at FROM queen.log_txns t WHERE t.partition_id = p_partition
             ORDER BY t.base_offset LIMIT p_most) t
     WHERE t.end_offset < v_part.log_start AND t.created_at < v_before;
    IF v_end IS NULL THEN
        RETURN 0;
    END IF;
    DELETE FROM queen.log_txns t WHERE t.partition_id = p_partition AND t.base_offset <= v_end;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    UPDATE queen.log_partitions p
       SET txns_start = v_end + 1,
           oldest_txn_at = (SELECT t.created_at FROM queen.log_txns t
                             WHERE t.partition_id = p_partition ORDER BY t.base_offset LIMIT 1)
     WHERE p.id = p_partition;
    RETURN v_count;
END $$;

-- Delete one partition that is empty, forgotten by the sidecar and idle since p_idle_days, the longest idle;
-- NULL: there is none. Its cursors go with it; a later push makes it anew. One that is locked is in use.
CREATE OR REPLACE FUNCTION queen.drop_idle_partition_v1(p_idle_days bigint)
RETURNS uuid LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
DECLARE
    v_before timestamptz := clock_timestamp() - make_interval(days => p_idle_days::integer);
    v_id     uuid;
BEGIN
    -- A push that came before the lock is seen: a row that changed meanwhile is judged anew.
    SELECT p.id INTO v_id FROM queen.log_partitions p
     WHERE p.oldest_live_at IS NULL AND p.oldest_txn_at IS NULL
       AND p.last_write_at < v_before AND p.created_at < v_before
     ORDER BY p.last_write_at LIMIT 1 FOR UPDATE SKIP LOCKED;
    PERFORM FROM queen.log_consumers c WHERE c.partition_id = v_id
      ORDER BY c.consumer_group FOR UPDATE;
    DELETE FROM queen.log_partitions p WHERE p.id = v_id;
    RETURN v_id;
END $$;
