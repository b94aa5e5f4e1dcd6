-- Commit segments that waited in a broker's spool (spec 4, spec 8.17). Like push_v1, but an earlier attempt
-- may have been committed without anybody knowing: a transactionId is looked up since p_since as well,
-- whatever the queue's window says.
--
-- A segment that has any of its hashes in the log writes nothing. Its rows tell which of its indexes
-- (0-based) was found at which offset, and whether that is inside the queue's window: then it is a duplicate,
-- whoever pushed it. Outside it is one only if it is the same message: the caller compares message ids and
-- sends the rest again, looking only above `examined`. p_verified and its companions mean what they mean to
-- push_v1, and here also "I have seen to what is there".
CREATE OR REPLACE FUNCTION queen.replay_v1(
    p_tenant uuid, p_queues text[], p_partitions text[], p_counts integer[], p_raw_bytes integer[],
    p_hashes bytea[], p_blobs bytea[], p_since timestamptz[], p_verified bigint[], p_verified_in uuid[],
    p_verified_since timestamptz[], p_sealed boolean[])
RETURNS TABLE (ord integer, partition_id uuid, base_offset bigint, created_at timestamptz, examined bigint,
               found_at integer[], found_of bigint[], found_inside boolean[])
LANGUAGE plpgsql SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    v_ids    uuid[];
    v_clean  integer[];
    v_dirty  integer[] := '{}';
    v_now    timestamptz;
    v_seg    record;
    v_window bigint;
    v_from   bigint;
BEGIN
    v_ids := queen.lock_partitions_v1(p_tenant, p_queues, p_partitions);
    v_now := clock_timestamp();
    FOR v_seg IN
        SELECT s.ord::integer AS ord, s.id, s.hashes, s.n, s.since, p.last_offset,
               q.dedup_window_seconds AS win,
               v.verified
          FROM unnest(v_ids, p_hashes, p_counts, p_since, p_verified, p_verified_in, p_verified_since)
               WITH ORDINALITY AS s(id, hashes, n, since, verified, verified_in, verified_since, ord)
         CROSS JOIN LATERAL (SELECT * FROM queen.log_partitions p WHERE p.id = s.id OFFSET 0) p
          JOIN queen.queues q ON q.id = p.queue_id
         CROSS JOIN LATERAL (SELECT CASE
                WHEN s.verified_in = s.id AND s.verified_since
                     < least(s.since, v_now - make_interval(secs => q.dedup_window_seconds))
                THEN s.verified ELSE -1 END AS verified) v
         WHERE p.last_offset > v.verified
    LOOP
        v_window := CASE WHEN v_seg.win > 0
            THEN queen.first_offset_since_v1(v_seg.id, v_now - make_interval(secs => v_seg.win))
            ELSE v_seg.last_offset + 1 END;
        v_from := least(v_window, queen.first_offset_since_v1(v_seg.id, v_seg.since));
        SELECT array_agg(d.i ORDER BY d.i, d.message_offset),
               array_agg(d.message_offset ORDER BY d.i, d.message_offset),
               array_agg(d.message_offset >= v_window ORDER BY d.i, d.message_offset)
          INTO found_at, found_of, found_inside
          FROM (SELECT g.i, t.message_offset
                  FROM generate_series(0, v_seg.n - 1) AS g(i)
                  JOIN queen.txn_hashes_v1(v_seg.id, greatest(v_from - 1, v_seg.verified),
                                           v_seg.last_offset) t
                    ON t.hash = substring(v_seg.hashes FROM g.i * 16 + 1 FOR 16)) d;
        IF found_at IS NOT NULL THEN
            v_dirty := v_dirty || v_seg.ord;
            ord := v_seg.ord; partition_id := v_seg.id; base_offset := NULL; created_at := NULL;
            examined := v_seg.last_offset;
            RETURN NEXT;
        END IF;
    END LOOP;

    SELECT array_agg(i ORDER BY i) INTO v_clean
      FROM generate_series(1, cardinality(p_queues)) AS g(i) WHERE i <> ALL (v_dirty);
    IF v_clean IS NULL THEN
        RETURN;
    END IF;
    -- Looked through already, under the locks that we still hold.
    RETURN QUERY
    SELECT v_clean[r.ord], r.partition_id, r.base_offset, r.created_at, NULL::bigint, NULL::integer[],
           NULL::bigint[], NULL::boolean[]
      FROM (SELECT array_agg(p_queues[i] ORDER BY k) AS queues, array_agg(p_partitions[i] ORDER BY k) AS parts,
                   array_agg(p_counts[i] ORDER BY k) AS counts, array_agg(p_raw_bytes[i] ORDER BY k) AS raw,
                   array_agg(p_hashes[i] ORDER BY k) AS hashes, array_agg(p_blobs[i] ORDER BY k) AS blobs,
                   array_agg(9223372036854775807 ORDER BY k) AS verified,
                   array_agg(NULL::uuid ORDER BY k) AS verified_in,
                   array_agg(NULL::timestamptz ORDER BY k) AS verified_since,
                   array_agg(p_sealed[i] ORDER BY k) AS sealed
              FROM unnest(v_clean) WITH ORDINALITY AS c(i, k)) a
     CROSS JOIN LATERAL queen.push_v1(p_tenant, a.queues, a.parts, a.counts, a.raw, a.hashes, a.blobs,
                                      a.verified, a.verified_in, a.verified_since, a.sealed) r;
END $$;
