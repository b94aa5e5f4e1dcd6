-- A dotted name gives namespace and task: orders.created.
CREATE OR REPLACE FUNCTION queen.namespace_of_v1(p_name text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN strpos(p_name, '.') > 0 THEN split_part(p_name, '.', 1) ELSE '' END
$$;

CREATE OR REPLACE FUNCTION queen.task_of_v1(p_name text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN strpos(p_name, '.') > 0 THEN substr(p_name, strpos(p_name, '.') + 1) ELSE '' END
$$;

-- Create the queues that don't exist yet.
-- Ordered by name, so that two calls that create the same ones can't deadlock.
CREATE OR REPLACE FUNCTION queen.ensure_queues_v1(p_tenant uuid, p_queues text[])
RETURNS void LANGUAGE sql SET enable_seqscan = off AS $$
    INSERT INTO queen.queues (tenant_id, name, namespace, task)
    SELECT p_tenant, n.name, queen.namespace_of_v1(n.name), queen.task_of_v1(n.name)
      FROM (SELECT DISTINCT unnest(p_queues) AS name) n
     WHERE (SELECT q.id FROM queen.queues q WHERE q.tenant_id = p_tenant AND q.name = n.name) IS NULL
     ORDER BY n.name COLLATE "C"
        ON CONFLICT (tenant_id, name) DO NOTHING
$$;

-- The same for partitions, and for the queues that they are in. Those are locked against deletion: a queue
-- that is just being deleted gets no partition, instead of breaking the foreign key.
CREATE OR REPLACE FUNCTION queen.ensure_partitions_v1(p_tenant uuid, p_queues text[], p_partitions text[])
RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    PERFORM queen.ensure_queues_v1(p_tenant, p_queues);
    INSERT INTO queen.log_partitions (queue_id, name)
    SELECT q.id, n.partition
      FROM (SELECT DISTINCT u.queue, u.partition
              FROM unnest(p_queues, p_partitions) AS u(queue, partition)) n
      JOIN queen.queues q ON q.tenant_id = p_tenant AND q.name = n.queue
     WHERE (SELECT p.id FROM queen.log_partitions p
             WHERE p.queue_id = q.id AND p.name = n.partition) IS NULL
     ORDER BY q.id, n.partition COLLATE "C"
       FOR KEY SHARE OF q
        ON CONFLICT (queue_id, name) DO NOTHING;
END $$;

-- Lock the partitions of a bundle in the one global order (ascending id), creating what is missing.
-- Returns their ids, aligned with the arguments. A queue deleted between look-up and lock is made anew.
CREATE OR REPLACE FUNCTION queen.lock_partitions_v1(p_tenant uuid, p_queues text[], p_partitions text[])
RETURNS uuid[] LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_ids    uuid[];
    v_wanted integer;
    v_locked integer;
BEGIN
    LOOP
        SELECT array_agg(f.id ORDER BY f.ord), count(DISTINCT f.id) INTO v_ids, v_wanted
          FROM (SELECT s.ord, (SELECT p.id FROM queen.queues q
                                 JOIN queen.log_partitions p ON p.queue_id = q.id
                                WHERE q.tenant_id = p_tenant AND q.name = s.queue
                                  AND p.name = s.partition) AS id
                  FROM unnest(p_queues, p_partitions) WITH ORDINALITY AS s(queue, partition, ord)) f;
        IF array_position(v_ids, NULL) IS NULL THEN
            PERFORM FROM queen.log_partitions p WHERE p.id = ANY (v_ids) ORDER BY p.id FOR NO KEY UPDATE;
            GET DIAGNOSTICS v_locked = ROW_COUNT;
            IF v_locked = v_wanted THEN
                RETURN v_ids;
            END IF;
        END IF;
        PERFORM queen.ensure_partitions_v1(p_tenant, p_queues, p_partitions);
    END LOOP;
END $$;

-- Commit a bundle: one segment for each of N different partitions, one transaction (spec 1, "Push").
--
-- Arrays are aligned, one element a segment: queue, partition, message count, decompressed size, 16-byte
-- hashes, blob. p_verified narrows the dedup probe: "none of these hashes occurs at or below this offset of
-- the partition p_verified_in among the messages created since p_verified_since". Where that doesn't fit
-- (another partition, a window that reaches further back) it counts as -1 and the whole window is probed.
-- The largest bigint says so of every partition: ids that the broker has just made up. Where all are such,
-- the two others may be NULL.
-- p_sealed says whether the payloads of a segment are encrypted (NULL: none are). Where that isn't what
-- the queue wants now, QT002 refuses the whole bundle: the broker's memory of the queue is stale.
--
-- A segment with a duplicate writes nothing: its row tells which indexes (0-based) are duplicates of
-- which offsets, and the caller sends the rest again. The others are committed.
CREATE OR REPLACE FUNCTION queen.push_v1(
    p_tenant uuid, p_queues text[], p_partitions text[], p_counts integer[], p_raw_bytes integer[],
    p_hashes bytea[], p_blobs bytea[], p_verified bigint[], p_verified_in uuid[],
    p_verified_since timestamptz[], p_sealed boolean[] DEFAULT NULL)
RETURNS TABLE (ord integer, partition_id uuid, base_offset bigint, created_at timestamptz,
               duplicate_at integer[], duplicate_of bigint[])
LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    v_n       constant integer := cardinality(p_queues);
    v_ids     uuid[];         -- aligned with the arguments, as the next two
    v_lasts   bigint[];       -- last_offset
    v_times   timestamptz[];  -- last_created_at
    v_locked  integer;
    v_differs boolean;        -- a queue's encryption is not what the caller thinks
    v_windows boolean;        -- a queue has a dedup window
    v_dirty   integer[] := ARRAY[]::integer[];  -- segments with duplicates
    v_now     timestamptz;
    v_seg     record;
    v_id      uuid;
    v_at      timestamptz;
    v_from    bigint;
    v_to      bigint;
BEGIN
    IF v_n IS DISTINCT FROM cardinality(p_partitions)
       OR v_n IS DISTINCT FROM cardinality(p_counts)
       OR v_n IS DISTINCT FROM cardinality(p_raw_bytes)
       OR v_n IS DISTINCT FROM cardinality(p_hashes)
       OR v_n IS DISTINCT FROM cardinality(p_blobs)
       OR v_n IS DISTINCT FROM coalesce(cardinality(p_sealed), v_n)
       OR v_n IS DISTINCT FROM cardinality(p_verified)
       OR v_n IS DISTINCT FROM coalesce(cardinality(p_verified_in), v_n)
       OR v_n IS DISTINCT FROM coalesce(cardinality(p_verified_since), v_n) THEN
        RAISE EXCEPTION 'push_v1: the arrays of a bundle do not fit together' USING ERRCODE = '22023';
    END IF;

    -- One segment, for a queue and a partition that exist, and nothing to probe: the same without arrays.
    IF v_n = 1 AND p_verified[1] = 9223372036854775807 THEN
        SELECT p.id, p.last_offset + 1, p.last_offset + p_counts[1], p.last_created_at
          INTO v_id, v_from, v_to, v_at
          FROM queen.queues q JOIN queen.log_partitions p ON p.queue_id = q.id
         WHERE q.tenant_id = p_tenant AND q.name = p_queues[1] AND p.name = p_partitions[1]
           AND q.encryption_enabled = coalesce(p_sealed[1], false)
           FOR NO KEY UPDATE OF p;
        IF FOUND THEN
            v_now := clock_timestamp();  -- after the wait for the lock: who subscribed meanwhile gets it
            v_at := greatest(v_now, v_at);
            INSERT INTO queen.log_segments (partition_id, base_offset, end_offset, raw_bytes, created_at, blob)
            VALUES (v_id, v_from, v_to, p_raw_bytes[1], v_at, p_blobs[1]);
            INSERT INTO queen.log_txns (partition_id, base_offset, end_offset, created_at, hashes)
            VALUES (v_id, v_from, v_to, v_at, p_hashes[1]);
            UPDATE queen.log_partitions p
               SET last_offset = v_to,
                   last_created_at = v_at,
                   last_write_at = CASE WHEN p.last_write_at < v_now - interval '1 second'
                                        THEN v_now ELSE p.last_write_at END,
                   oldest_live_at = coalesce(p.oldest_live_at, v_at),
                   oldest_txn_at = coalesce(p.oldest_txn_at, v_at)
             WHERE p.id = v_id;
            ord := 1; partition_id := v_id; base_offset := v_from; created_at := v_at;
            RETURN NEXT;
            RETURN;
        END IF;
    END IF;

    -- As lock_partitions_v1, in one statement that also reads what the rest needs.
    LOOP
        SELECT array_agg(f.id ORDER BY f.ord), array_agg(f.last_offset ORDER BY f.ord),
               array_agg(f.last_created_at ORDER BY f.ord), count(DISTINCT f.id), bool_or(f.differs),
               bool_or(f.windowed)
          INTO v_ids, v_lasts, v_times, v_locked, v_differs, v_windows
          FROM (SELECT k.*, p.last_offset, p.last_created_at
                  FROM (SELECT s.ord, p.id, p.windowed,
                               p.encryption_enabled <> coalesce(s.sealed, false) AS differs
                          FROM unnest(p_queues, p_partitions, p_sealed)
                               WITH ORDINALITY AS s(queue, partition, sealed, ord)
                         CROSS JOIN LATERAL (
                               SELECT p.id, q.encryption_enabled, q.dedup_window_seconds > 0 AS windowed
                                 FROM queen.queues q JOIN queen.log_partitions p ON p.queue_id = q.id
                                WHERE q.tenant_id = p_tenant AND q.name = s.queue AND p.name = s.partition
                               OFFSET 0) p
                         ORDER BY p.id) k
                 CROSS JOIN LATERAL (SELECT * FROM queen.log_partitions p WHERE p.id = k.id
                                        FOR NO KEY UPDATE) p) f;
        EXIT WHEN coalesce(cardinality(v_ids), 0) = v_n;
        PERFORM queen.ensure_partitions_v1(p_tenant, p_queues, p_partitions);
    END LOOP;
    IF v_locked < v_n THEN
        RAISE EXCEPTION 'push_v1: a partition stands twice in one bundle' USING ERRCODE = '22023';
    END IF;
    IF v_differs THEN
        RAISE EXCEPTION 'push_v1: the encryption of a queue is not what it was' USING ERRCODE = 'QT002';
    END IF;
    v_now := clock_timestamp();

    -- Dedup, exact, under the locks: only where something may have come since the caller last looked.
    IF v_windows AND (9223372036854775807 = ALL (p_verified)) IS NOT TRUE THEN
        FOR v_seg IN
            SELECT s.ord::integer AS ord, s.id, s.last_offset, s.hashes, s.n, q.dedup_window_seconds AS win,
                   v.verified
              FROM unnest(v_ids, v_lasts, p_hashes, p_counts, p_verified, p_verified_in, p_verified_since)
                   WITH ORDINALITY
                   AS s(id, last_offset, hashes, n, verified, verified_in, verified_since, ord)
             CROSS JOIN LATERAL (SELECT * FROM queen.log_partitions p WHERE p.id = s.id OFFSET 0) p
              JOIN queen.queues q ON q.id = p.queue_id
             CROSS JOIN LATERAL (SELECT CASE
                    WHEN s.verified = 9223372036854775807 THEN s.verified
                    WHEN s.verified_in = s.id
                     AND s.verified_since < v_now - make_interval(secs => q.dedup_window_seconds)
                    THEN s.verified ELSE -1 END AS verified) v
             WHERE q.dedup_window_seconds > 0 AND s.last_offset > v.verified
        LOOP
            v_from := queen.first_offset_since_v1(v_seg.id, v_now - make_interval(secs => v_seg.win));
            SELECT array_agg(d.i ORDER BY d.i), array_agg(d.original ORDER BY d.i)
              INTO duplicate_at, duplicate_of
              FROM (SELECT g.i, min(t.message_offset) AS original
                      FROM generate_series(0, v_seg.n - 1) AS g(i)
                      JOIN queen.txn_hashes_v1(v_seg.id, greatest(v_from - 1, v_seg.verified),
                                               v_seg.last_offset) t
                        ON t.hash = substring(v_seg.hashes FROM g.i * 16 + 1 FOR 16)
                     GROUP BY g.i) d;
            IF duplicate_at IS NOT NULL THEN
                v_dirty := v_dirty || v_seg.ord;
                ord := v_seg.ord; partition_id := v_seg.id; base_offset := NULL; created_at := NULL;
                RETURN NEXT;
            END IF;
        END LOOP;
    END IF;

    -- Three statements and no CTE: joining segments to what an UPDATE returned costs more than saying twice
    -- what it will do.
    INSERT INTO queen.log_segments (partition_id, base_offset, end_offset, raw_bytes, created_at, blob)
    SELECT s.id, s.last + 1, s.last + s.n, s.raw, greatest(v_now, s.at), s.blob
      FROM unnest(v_ids, v_lasts, v_times, p_counts, p_raw_bytes, p_blobs)
           WITH ORDINALITY AS s(id, last, at, n, raw, blob, ord)
     WHERE s.ord <> ALL (v_dirty);
    INSERT INTO queen.log_txns (partition_id, base_offset, end_offset, created_at, hashes)
    SELECT s.id, s.last + 1, s.last + s.n, greatest(v_now, s.at), s.hashes
      FROM unnest(v_ids, v_lasts, v_times, p_counts, p_hashes)
           WITH ORDINALITY AS s(id, last, at, n, hashes, ord)
     WHERE s.ord <> ALL (v_dirty);
    RETURN QUERY
    UPDATE queen.log_partitions p
       SET last_offset = s.last + s.n,
           last_created_at = greatest(v_now, s.at),
           last_write_at = CASE WHEN p.last_write_at < v_now - interval '1 second'
                                THEN v_now ELSE p.last_write_at END,
           oldest_live_at = coalesce(p.oldest_live_at, greatest(v_now, s.at)),
           oldest_txn_at = coalesce(p.oldest_txn_at, greatest(v_now, s.at))
      FROM unnest(v_ids, v_lasts, v_times, p_counts) WITH ORDINALITY AS s(id, last, at, n, ord)
     WHERE p.id = s.id AND p.id = ANY (v_ids) AND s.ord <> ALL (v_dirty)
 RETURNING s.ord::integer, p.id, s.last + 1, p.last_created_at, NULL::integer[], NULL::bigint[];
END $$;

-- The segments that hold given offsets, to find the message ids of a duplicate's original. An offset
-- that retention already removed has no row.
CREATE OR REPLACE FUNCTION queen.segments_at_v1(p_partition uuid, p_offsets bigint[])
RETURNS TABLE (message_offset bigint, base_offset bigint, created_at timestamptz, blob bytea)
LANGUAGE sql STABLE SET enable_seqscan = off AS $$
    SELECT o.message_offset, s.base_offset, s.created_at, s.blob
      FROM unnest(p_offsets) AS o(message_offset)
     CROSS JOIN LATERAL (
            SELECT * FROM queen.log_segments s
             WHERE s.partition_id = p_partition AND s.base_offset <= o.message_offset
             ORDER BY s.base_offset DESC LIMIT 1) s
     WHERE s.end_offset >= o.message_offset
$$;

-- The next sidecar rows of a partition above p_after, p_most messages or a little more; with p_after -1
-- from the start of its queue's dedup window. covered_since: where that window starts now.
CREATE OR REPLACE FUNCTION queen.history_v1(p_partition uuid, p_after bigint, p_most bigint)
RETURNS TABLE (base_offset bigint, end_offset bigint, created_at timestamptz, hashes bytea,
               covered_since timestamptz)
LANGUAGE plpgsql STABLE SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    v_since timestamptz;
    v_first bigint;
BEGIN
    SELECT clock_timestamp() - make_interval(secs => q.dedup_window_seconds) INTO v_since
      FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id WHERE p.id = p_partition;
    v_first := CASE WHEN p_after >= 0 THEN p_after + 1
                    ELSE queen.first_offset_since_v1(p_partition, v_since) END;
    RETURN QUERY
    SELECT t.base_offset, t.end_offset, t.created_at, t.hashes, v_since
      FROM queen.log_txns t
     WHERE t.partition_id = p_partition AND t.end_offset >= v_first
       AND t.base_offset < v_first + p_most
       AND t.base_offset >= coalesce((SELECT f.base_offset FROM queen.log_txns f
                                       WHERE f.partition_id = p_partition AND f.base_offset <= v_first
                                       ORDER BY f.base_offset DESC LIMIT 1), v_first)
     ORDER BY t.base_offset;
END $$;
