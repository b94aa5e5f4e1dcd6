-- Register a query by its name. matches false: it is there with another config_hash, and nothing has
-- changed. p_reset takes the new one and drops all state; the cursors of its group stay where they are.
CREATE OR REPLACE FUNCTION queen.register_stream_v1(
    p_tenant uuid, p_name text, p_source text, p_sink text, p_config_hash text, p_reset boolean)
RETURNS TABLE (query_id uuid, fresh boolean, matches boolean) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_query queen_streams.queries;
BEGIN
    fresh := false;
    matches := true;
    LOOP    -- again, when somebody else creates or deletes it meanwhile
        SELECT * INTO v_query FROM queen_streams.queries q
         WHERE q.tenant_id = p_tenant AND q.name = p_name FOR NO KEY UPDATE;
        EXIT WHEN FOUND;
        INSERT INTO queen_streams.queries AS q (tenant_id, name, source_queue, sink_queue, config_hash)
        VALUES (p_tenant, p_name, p_source, p_sink, p_config_hash)
            ON CONFLICT (tenant_id, name) DO NOTHING
     RETURNING q.id INTO query_id;
        IF FOUND THEN
            fresh := true;
            RETURN NEXT;
            RETURN;
        END IF;
    END LOOP;
    query_id := v_query.id;
    matches := p_reset OR v_query.config_hash = p_config_hash;
    IF matches THEN
        IF p_reset THEN
            DELETE FROM queen_streams.shards s WHERE s.query_id = v_query.id;
        END IF;
        UPDATE queen_streams.queries q
           SET source_queue = p_source, sink_queue = p_sink, config_hash = p_config_hash,
               updated_at = clock_timestamp()
         WHERE q.id = v_query.id
           AND (q.source_queue, q.sink_queue, q.config_hash) IS DISTINCT FROM (p_source, p_sink, p_config_hash);
    END IF;
    RETURN NEXT;
END $$;

-- The state of a query in one partition, in the order of the keys: those in p_keys, that start with
-- p_prefix, and that were ripe at p_ripe_at; NULL doesn't narrow. No row with a NULL key: there is no
-- such query.
CREATE OR REPLACE FUNCTION queen.stream_state_v1(
    p_tenant uuid, p_query uuid, p_partition uuid, p_keys bytea[], p_prefix bytea,
    p_ripe_at double precision)
RETURNS TABLE (key bytea, value text) LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    v_from constant bytea := coalesce(p_prefix, '');
    v_to   constant bytea := v_from || '\xff';   -- a byte that no UTF-8 has
BEGIN
    IF NOT EXISTS (SELECT FROM queen_streams.queries q WHERE q.tenant_id = p_tenant AND q.id = p_query) THEN
        RETURN NEXT;
        RETURN;
    END IF;
    -- Planned at each call: state grows from nothing, and a plan that was kept from then would read all.
    -- OFFSET 0 keeps the narrower condition inside, where an index serves it.
    IF p_keys IS NOT NULL THEN
        RETURN QUERY EXECUTE
        'SELECT r.key, r.value
           FROM (SELECT DISTINCT unnest($3) AS key) k
          CROSS JOIN LATERAL (
                SELECT s.key, s.value, s.ripe_at FROM queen_streams.state s
                 WHERE s.query_id = $1 AND s.partition_id = $2 AND s.key = k.key OFFSET 0) r
          WHERE r.key >= $4 AND r.key < $5 AND ($6 IS NULL OR r.ripe_at <= $6)
          ORDER BY r.key'
        USING p_query, p_partition, p_keys, v_from, v_to, p_ripe_at;
    ELSIF p_ripe_at IS NOT NULL THEN
        RETURN QUERY EXECUTE
        'SELECT r.key, r.value
           FROM (SELECT s.key, s.value FROM queen_streams.state s
                  WHERE s.query_id = $1 AND s.partition_id = $2 AND s.ripe_at <= $5 OFFSET 0) r
          WHERE r.key >= $3 AND r.key < $4
          ORDER BY r.key'
        USING p_query, p_partition, v_from, v_to, p_ripe_at;
    ELSE
        RETURN QUERY EXECUTE
        'SELECT s.key, s.value FROM queen_streams.state s
          WHERE s.query_id = $1 AND s.partition_id = $2 AND s.key >= $3 AND s.key < $4
          ORDER BY s.key'
        USING p_query, p_partition, v_from, v_to;
    END IF;
END $$;

-- One cycle of a query in one partition of its source, all or nothing: pushes (the arrays of push_v1),
-- the commit of source messages, and changes of state (p_values NULL deletes the key).
--
-- p_lease NULL commits no messages. p_release commits the whole leased batch; without it the cursor
-- advances by p_count messages and the lease stays, so that the rest comes again in order when it expires.
--
-- refusal NULL: committed, now or by an earlier attempt with the same p_cycle. Otherwise it says why
-- nothing was written. more_in_queue, more_in_partition: where a lease was released, so that there may be
-- more to claim now or after the next push. Locks: partitions ascending, the cursor, the shard, its state.
CREATE OR REPLACE FUNCTION queen.stream_cycle_v1(
    p_tenant uuid, p_cycle uuid, p_query uuid, p_partition uuid, p_group text,
    p_keys bytea[], p_values text[], p_ripe_at double precision[],
    p_queues text[], p_partitions text[], p_counts integer[], p_raw_bytes integer[],
    p_hashes bytea[], p_blobs bytea[], p_sealed boolean[], p_verified bigint[],
    p_lease text, p_ack_hash bytea, p_count bigint, p_release boolean)
RETURNS TABLE (refusal text, lease_released boolean, more_in_queue text, more_in_partition text)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_targets uuid[];
    v_id      uuid;
    v_part    record;
    v_cursor  queen.log_consumers;
    v_until   bigint;
    v_deleted bytea[];
BEGIN
    lease_released := false;
    IF NOT EXISTS (SELECT FROM queen_streams.queries q WHERE q.tenant_id = p_tenant AND q.id = p_query) THEN
        refusal := 'unknown query_id';
        RETURN NEXT;
        RETURN;
    END IF;
    BEGIN
        -- The source too, ascending with the targets: its shard and state refer to it. Pushes into it go on.
        PERFORM queen.ensure_partitions_v1(p_tenant, p_queues, p_partitions);
        v_targets := ARRAY(
            SELECT (SELECT p.id FROM queen.queues q JOIN queen.log_partitions p ON p.queue_id = q.id
                     WHERE q.tenant_id = p_tenant AND q.name = u.queue AND p.name = u.partition)
              FROM unnest(p_queues, p_partitions) AS u(queue, partition));
        FOR v_id IN SELECT DISTINCT u.id FROM unnest(v_targets || p_partition) AS u(id) ORDER BY u.id LOOP
            IF v_id = ANY (v_targets) THEN
                PERFORM FROM queen.log_partitions p WHERE p.id = v_id FOR NO KEY UPDATE;
            ELSE
                PERFORM FROM queen.log_partitions p WHERE p.id = v_id FOR KEY SHARE;
            END IF;
        END LOOP;
        SELECT p.name, p.log_start, q.name AS queue_name INTO v_part
          FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id
         WHERE p.id = p_partition AND q.tenant_id = p_tenant;
        IF NOT FOUND THEN
            refusal := 'unknown partition_id';
            RAISE EXCEPTION 'refused' USING ERRCODE = 'QT001';
        END IF;

        IF p_lease IS NOT NULL THEN
            SELECT * INTO v_cursor FROM queen.log_consumers c
             WHERE c.partition_id = p_partition AND c.consumer_group = p_group FOR NO KEY UPDATE;
            -- A client that repeats a cycle after a lost answer names a message that it has left behind
            -- already, under the lease that it still has: that cycle has committed.
            IF v_cursor.worker_id = p_lease
               AND NOT EXISTS (SELECT FROM queen.txn_hashes_v1(p_partition, v_cursor.committed,
                                                               v_cursor.batch_end) t
                                WHERE t.hash = p_ack_hash)
               AND EXISTS (SELECT FROM queen.txn_hashes_v1(p_partition, v_cursor.committed - 10000,
                                                           v_cursor.committed) t
                            WHERE t.hash = p_ack_hash) THEN
                RETURN NEXT;
                RETURN;
            END IF;
        END IF;
        INSERT INTO queen_streams.shards AS s (query_id, partition_id, last_cycle)
        VALUES (p_query, p_partition, p_cycle)
            ON CONFLICT (query_id, partition_id) DO UPDATE
           SET last_cycle = excluded.last_cycle, last_cycle_at = clock_timestamp(), cycles = s.cycles + 1
         WHERE s.last_cycle <> excluded.last_cycle;
        IF NOT FOUND THEN    -- an earlier attempt has committed, perhaps while this one waited for it
            lease_released := p_lease IS NOT NULL AND p_release;
            IF lease_released THEN
                more_in_queue := v_part.queue_name;
                more_in_partition := v_part.name;
            END IF;
            RETURN NEXT;
            RETURN;
        END IF;

        IF cardinality(p_queues) > 0 AND EXISTS (
                SELECT FROM queen.push_v1(p_tenant, p_queues, p_partitions, p_counts, p_raw_bytes, p_hashes,
                                          p_blobs, p_verified, array_fill(NULL::uuid, ARRAY[cardinality(p_queues)]),
                                          array_fill(NULL::timestamptz, ARRAY[cardinality(p_queues)]), p_sealed) p
                 WHERE p.base_offset IS NULL) THEN
            refusal := 'a transactionId of push_items is already in its queue';
            RAISE EXCEPTION 'refused' USING ERRCODE = 'QT001';
        END IF;

        IF p_lease IS NOT NULL THEN
            IF v_cursor.worker_id IS DISTINCT FROM p_lease OR v_cursor.batch_end IS NULL
               OR v_cursor.lease_expires_at <= clock_timestamp() THEN
                refusal := 'invalid or expired lease';
                RAISE EXCEPTION 'refused' USING ERRCODE = 'QT001';
            END IF;
            v_until := CASE WHEN p_release THEN v_cursor.batch_end ELSE v_cursor.committed + p_count END;
            IF NOT p_release AND v_part.log_start > v_cursor.committed + 1 THEN
                -- Retention has passed the cursor: the batch began later than behind it, and only the
                -- last message that was worked on tells where.
                v_until := coalesce((SELECT max(t.message_offset)
                                       FROM queen.txn_hashes_v1(p_partition, v_cursor.committed, v_cursor.batch_end) t
                                      WHERE t.hash = p_ack_hash), v_until);
            END IF;
            IF v_until > v_cursor.batch_end THEN
                refusal := 'ack.count is more than the leased batch has left';
                RAISE EXCEPTION 'refused' USING ERRCODE = 'QT001';
            END IF;
            lease_released := v_until = v_cursor.batch_end;
            UPDATE queen.log_consumers c
               SET committed = v_until,
                   total_consumed = c.total_consumed + v_until - c.committed,
                   batch_end = CASE WHEN lease_released THEN NULL ELSE c.batch_end END,
                   worker_id = CASE WHEN lease_released THEN NULL ELSE c.worker_id END,
                   lease_expires_at = CASE WHEN lease_released THEN NULL ELSE c.lease_expires_at END,
                   batch_retry_count = CASE WHEN lease_released THEN 0 ELSE c.batch_retry_count END,
                   attempt_offset = CASE WHEN v_until >= c.attempt_offset THEN NULL ELSE c.attempt_offset END,
                   attempt_count = CASE WHEN v_until >= c.attempt_offset THEN 0 ELSE c.attempt_count END
             WHERE c.partition_id = p_partition AND c.consumer_group = p_group;
            IF lease_released THEN
                more_in_queue := v_part.queue_name;
                more_in_partition := v_part.name;
            END IF;
        END IF;

        v_deleted := ARRAY(SELECT u.key FROM unnest(p_keys, p_values) AS u(key, value) WHERE u.value IS NULL);
        IF cardinality(v_deleted) > 0 THEN
            -- By a look-up for each key, planned now (see stream_state_v1); the shard's lock keeps them put.
            EXECUTE 'DELETE FROM queen_streams.state s WHERE s.ctid = ANY (ARRAY(
                            SELECT (SELECT o.ctid FROM queen_streams.state o
                                     WHERE o.query_id = $1 AND o.partition_id = $2 AND o.key = d.key)
                              FROM unnest($3) AS d(key)))'
              USING p_query, p_partition, v_deleted;
        END IF;
        INSERT INTO queen_streams.state (query_id, partition_id, key, value, ripe_at)
        SELECT p_query, p_partition, u.key, u.value, u.ripe_at
          FROM unnest(p_keys, p_values, p_ripe_at) AS u(key, value, ripe_at)
         WHERE u.value IS NOT NULL
            ON CONFLICT (query_id, partition_id, key) DO UPDATE
           SET value = excluded.value, ripe_at = excluded.ripe_at;
    EXCEPTION WHEN SQLSTATE 'QT001' THEN
        lease_released := false;
        more_in_queue := NULL;
        more_in_partition := NULL;
    END;
    RETURN NEXT;
END $$;
