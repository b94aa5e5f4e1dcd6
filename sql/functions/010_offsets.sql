-- Functions of the hot paths SET enable_seqscan = off, and look rows up in LATERAL (... OFFSET 0) where a plain
-- join could become a hash join: a session keeps its generic plans, and one made while the tables were
-- empty or tiny would read all of them, a million rows a call, until the next ANALYZE.
-- tests/store/test_plans.py counts the rows. Where planning again for each call would cost more than the
-- call, they SET plan_cache_mode too: left alone, PostgreSQL keeps comparing costs that arrays of unknown
-- length blur, and plans anew for ever.

-- The first offset of a partition whose message was created at or after p_since, as far back as the
-- sidecar reaches (beyond log_start: dedup outlives the segments); last offset + 1 when there is none.
-- created_at is monotone in the offset (spec 1, invariant 1), so this gallops back from the newest row
-- and then bisects: a handful of index look-ups, however long the history is.
CREATE OR REPLACE FUNCTION queen.first_offset_since_v1(p_partition uuid, p_since timestamptz)
RETURNS bigint LANGUAGE plpgsql STABLE SET enable_seqscan = off AS $$
DECLARE
    v_row   record;
    v_low   bigint;          -- every offset below it is older than p_since
    v_high  bigint;          -- it and every offset above it are not older
    v_step  bigint := 1;
    v_probe bigint;
BEGIN
    SELECT txns_start, last_offset + 1 AS next_offset INTO v_row
      FROM queen.log_partitions WHERE id = p_partition;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    v_low := least(v_row.txns_start, v_row.next_offset);
    v_high := v_row.next_offset;
    IF p_since = '-infinity' THEN
        RETURN v_low;
    END IF;
    v_probe := v_high - 1;
    WHILE v_low < v_high LOOP
        SELECT t.base_offset, t.end_offset, t.created_at INTO v_row
          FROM queen.log_txns t
         WHERE t.partition_id = p_partition AND t.base_offset <= v_probe
         ORDER BY t.base_offset DESC LIMIT 1;
        IF NOT FOUND OR v_row.end_offset < v_low THEN
            v_low := v_probe + 1;
        ELSIF v_row.created_at >= p_since THEN
            v_high := greatest(v_row.base_offset, v_low);
        ELSE
            v_low := v_row.end_offset + 1;
            v_step := 0;  -- the gallop is over: bisect from here on
        END IF;
        IF v_step > 0 THEN
            v_probe := greatest(v_high - v_step, v_low);
            v_step := v_step * 2;
        ELSE
            v_probe := (v_low + v_high) / 2;
        END IF;
    END LOOP;
    RETURN v_high;
END $$;

-- The sidecar rows that cover (p_after, p_upto], one row a message. Offsets are dense, so the first row
-- to read is the one that holds p_after + 1.
CREATE OR REPLACE FUNCTION queen.txn_hashes_v1(p_partition uuid, p_after bigint, p_upto bigint)
RETURNS TABLE (message_offset bigint, hash bytea) LANGUAGE sql STABLE ROWS 200 AS $$
    SELECT t.base_offset + g, substring(t.hashes FROM g * 16 + 1 FOR 16)
      FROM queen.log_txns t
     CROSS JOIN LATERAL generate_series(
            greatest(p_after + 1 - t.base_offset, 0)::integer,
            (least(p_upto, t.end_offset) - t.base_offset)::integer) AS g
     WHERE t.partition_id = p_partition
       AND t.base_offset <= p_upto
       AND t.base_offset >= coalesce(
            (SELECT f.base_offset FROM queen.log_txns f
              WHERE f.partition_id = p_partition AND f.base_offset <= p_after + 1
              ORDER BY f.base_offset DESC LIMIT 1), p_after + 1)
       AND t.end_offset > p_after
$$;
