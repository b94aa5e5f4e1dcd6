-- Apply many acknowledgements in one transaction (spec 2, "Ack").
--
-- A target is what one request says of one (partition, group) under one lease; p_hashes holds 16 bytes an
-- item, p_statuses one letter an item: c completed, f failed, r retry, d dead-letter. Targets are applied
-- each by itself, in the global order of locks, those of one cursor as they stand; ord says whose a row is.
--
-- p_whole[i] > 0: the caller knows, having delivered the batch, that the target completes all of it, so
-- many messages; its hashes and statuses are not looked at. Its verdicts are '', or NULL where it did not
-- apply (lost or expired lease, another size): then the caller says it again with hashes. p_whole NULL: no
-- target is such.
--
-- The letters sent back, one an item: c committed, n already committed (noop), a a late nack (already
-- committed), u unresolvable, l invalid or expired lease, x consumer not found, w not committed because
-- a lower offset of this call was not completed, f, r, d as asked and done, and for f when the budget ran
-- out: d dead-lettered or z dropped.
--
-- A dead letter needs what only the caller can read from the segment. Where p_letters (jsonb, one array
-- element an item that carries any: target, item, error, and once known offset, message) lacks it, the
-- target is left alone and needs_payload names the offset; the caller reads it and sends the target again.
-- queue_name, partition_name: where a lease was released; has_more: it left messages to claim there.
CREATE OR REPLACE FUNCTION queen.ack_v1(
    p_partitions uuid[], p_groups text[], p_leases text[], p_whole integer[], p_hashes bytea[],
    p_statuses text[], p_letters jsonb)
RETURNS TABLE (ord integer, verdicts text, lease_released boolean, needs_payload bigint,
               queue_name text, partition_name text, has_more boolean)
LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    v_now      timestamptz := clock_timestamp();
    v_order    integer[] := ARRAY[1];
    v_id       uuid;        -- the target at hand
    v_group    text;
    v_lease    text;
    v_whole    bigint;      -- how many messages, if it completes all of the batch
    v_hashes   bytea;
    v_statuses text;
    v_n        integer;
    v_cursor   queen.log_consumers;
    v_part     record;
    v_offsets  bigint[];    -- the offset of each item, NULL where it is not in the leased batch
    v_old      boolean[];   -- whether an item outside the batch is at or below the cursor
    v_missing  bytea[];     -- hashes that are still looked for below the cursor
    v_late     bytea[];     -- those found there
    v_upto     bigint;      -- the next offset to look at, going down to
    v_bottom   bigint;      -- this one, exclusive
    v_span     bigint;      -- how many at a time
    v_done     bigint;      -- highest completed offset
    v_stop     bigint;      -- lowest offset with another status
    v_why      text;        -- the strongest status at v_stop: d, f or r
    v_until    bigint;      -- the new cursor
    v_dead     boolean;
    v_drop     boolean;
    v_letter   jsonb;
BEGIN
    IF cardinality(p_partitions) <> 1 THEN
        v_order := ARRAY(SELECT u.i::integer
                           FROM unnest(p_partitions, p_groups) WITH ORDINALITY AS u(p, g, i)
                          ORDER BY u.p, u.g, u.i);
    END IF;
    FOREACH ord IN ARRAY v_order LOOP
        v_id := p_partitions[ord]; v_group := p_groups[ord]; v_lease := nullif(p_leases[ord], '');
        v_whole := p_whole[ord];
        verdicts := NULL; lease_released := false; needs_payload := NULL;
        queue_name := NULL; partition_name := NULL; has_more := false;

        IF v_whole > 0 THEN
            IF v_lease IS NULL THEN    -- it names no batch
                RETURN NEXT;
                CONTINUE;
            END IF;
        ELSE
            v_hashes := p_hashes[ord]; v_statuses := p_statuses[ord]; v_n := length(v_statuses);
            SELECT * INTO v_cursor FROM queen.log_consumers c
             WHERE c.partition_id = v_id AND c.consumer_group = v_group
               FOR NO KEY UPDATE;
            IF NOT FOUND THEN
                verdicts := repeat('x', v_n);
                RETURN NEXT;
                CONTINUE;
            END IF;
            -- Most acks say that all of the batch is completed, in its order: one comparison tells.
            v_whole := CASE
                WHEN v_n = v_cursor.batch_end - v_cursor.committed
                     AND v_statuses = repeat('c', v_n)
                     AND (v_lease IS NULL
                          OR v_cursor.worker_id = v_lease AND v_cursor.lease_expires_at > v_now)
                     AND v_hashes = (
                         SELECT string_agg(
                                substring(t.hashes
                                    FROM greatest(v_cursor.committed + 1 - t.base_offset, 0)::integer * 16 + 1
                                    FOR (least(t.end_offset, v_cursor.batch_end)
                                         - greatest(t.base_offset - 1, v_cursor.committed))::integer * 16),
                                ''::bytea ORDER BY t.base_offset)
                           FROM queen.log_txns t
                          WHERE t.partition_id = v_id
                            AND t.base_offset <= v_cursor.batch_end AND t.end_offset > v_cursor.committed
                            AND t.base_offset >= coalesce(
                                (SELECT f.base_offset FROM queen.log_txns f
                                  WHERE f.partition_id = v_id AND f.base_offset <= v_cursor.committed + 1
                                  ORDER BY f.base_offset DESC LIMIT 1), 0))
                THEN v_n END;
        END IF;
        IF v_whole > 0 THEN
            UPDATE queen.log_consumers c
               SET committed = c.batch_end, batch_end = NULL, worker_id = NULL, lease_expires_at = NULL,
                   total_consumed = c.total_consumed + v_whole, batch_retry_count = 0,
                   attempt_offset = CASE WHEN c.attempt_offset > c.batch_end THEN c.attempt_offset END,
                   attempt_count = CASE WHEN c.attempt_offset > c.batch_end THEN c.attempt_count ELSE 0 END
              FROM queen.log_partitions p
             WHERE c.partition_id = v_id AND c.consumer_group = v_group AND p.id = v_id
               AND c.batch_end - c.committed = v_whole
               AND (v_lease IS NULL OR c.worker_id = v_lease AND c.lease_expires_at > v_now)
         RETURNING (SELECT q.name FROM queen.queues q WHERE q.id = p.queue_id), p.name,
                   p.last_offset > c.committed
              INTO queue_name, partition_name, has_more;
            lease_released := FOUND;
            IF lease_released THEN
                verdicts := CASE WHEN p_whole[ord] > 0 THEN '' ELSE v_statuses END;
            ELSE
                has_more := false;
            END IF;
            RETURN NEXT;
            CONTINUE;
        END IF;

        -- Items to offsets of the leased batch. A transactionId may stand more than once in it (dedup
        -- off): its k-th item means its k-th message, items beyond that mean the last one.
        SELECT array_agg(m.message_offset ORDER BY i.i) INTO v_offsets
          FROM (SELECT g AS i, h.hash, row_number() OVER (PARTITION BY h.hash ORDER BY g) AS k
                  FROM generate_series(0, v_n - 1) g
                 CROSS JOIN LATERAL (SELECT substring(v_hashes FROM g * 16 + 1 FOR 16) AS hash) h) i
          LEFT JOIN (SELECT t.message_offset, t.hash,
                            row_number() OVER (PARTITION BY t.hash ORDER BY t.message_offset) AS k,
                            count(*) OVER (PARTITION BY t.hash) AS n
                       FROM queen.txn_hashes_v1(v_id, v_cursor.committed, v_cursor.batch_end) t) m
            ON m.hash = i.hash AND m.k = least(i.k, m.n);

        -- The rest may be at or below the cursor: a client that says it again after a lost answer. So it is
        -- looked for from the cursor downwards, in growing steps; only what is nowhere costs all of them.
        v_old := NULL;
        IF array_position(v_offsets, NULL) IS NOT NULL THEN
            v_missing := ARRAY(SELECT DISTINCT substring(v_hashes FROM (u.i::integer - 1) * 16 + 1 FOR 16)
                                 FROM unnest(v_offsets) WITH ORDINALITY AS u(o, i) WHERE u.o IS NULL);
            v_late := '{}';
            v_upto := v_cursor.committed;
            v_span := 1000;
            SELECT p.txns_start - 1 INTO v_bottom FROM queen.log_partitions p WHERE p.id = v_id;
            WHILE v_upto > v_bottom AND cardinality(v_missing) > 0 LOOP
                v_late := v_late || ARRAY(
                    SELECT DISTINCT t.hash
                      FROM queen.txn_hashes_v1(v_id, greatest(v_upto - v_span, v_bottom), v_upto) t
                     WHERE t.hash = ANY (v_missing));
                v_missing := ARRAY(SELECT unnest(v_missing) EXCEPT SELECT unnest(v_late));
                v_upto := v_upto - v_span;
                v_span := v_span * 8;
            END LOOP;
            SELECT array_agg(u.o IS NULL AND substring(v_hashes FROM (u.i::integer - 1) * 16 + 1 FOR 16)
                                             = ANY (v_late) ORDER BY u.i) INTO v_old
              FROM unnest(v_offsets) WITH ORDINALITY AS u(o, i);
        END IF;

        IF v_lease IS NOT NULL
           AND (v_cursor.worker_id IS DISTINCT FROM v_lease OR v_cursor.lease_expires_at <= v_now) THEN
            SELECT string_agg(CASE WHEN v_old[i] AND substr(v_statuses, i, 1) = 'c' THEN 'n'
                                   WHEN v_old[i] THEN 'a'
                                   ELSE 'l' END, '' ORDER BY i) INTO verdicts
              FROM generate_series(1, v_n) i;
            RETURN NEXT;
            CONTINUE;
        END IF;

        SELECT max(u.o) FILTER (WHERE u.s = 'c'), min(u.o) FILTER (WHERE u.s <> 'c')
          INTO v_done, v_stop
          FROM unnest(v_offsets, string_to_array(v_statuses, NULL)) AS u(o, s);
        v_until := v_cursor.committed;
        IF v_stop IS NULL THEN
            v_until := coalesce(v_done, v_until);
        ELSE
            -- Only silent gaps below the highest completed offset are implied done: without a completed
            -- one the cursor stays. (least() ignores NULL.)
            v_until := greatest(v_until, least(coalesce(v_done, v_until), v_stop - 1));
        END IF;

        v_why := NULL; v_dead := false; v_drop := false; v_letter := NULL;
        IF v_stop IS NOT NULL THEN
            SELECT min(u.s) INTO v_why    -- 'd' < 'f' < 'r', which is their rank too
              FROM unnest(v_offsets, string_to_array(v_statuses, NULL)) AS u(o, s)
             WHERE u.o = v_stop AND u.s <> 'c';
            SELECT q.retry_limit, q.dead_letter_queue OR q.dlq_after_max_retries AS keeps, q.tenant_id,
                   q.name AS queue_name, p.name AS partition_name INTO v_part
              FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id
             WHERE p.id = v_id;
            IF v_why = 'f' THEN
                v_cursor.attempt_count := CASE WHEN v_cursor.attempt_offset = v_stop
                                               THEN v_cursor.attempt_count ELSE 0 END + 1;
                v_cursor.attempt_offset := v_stop;
            END IF;
            v_dead := v_why = 'd'
                      OR (v_why = 'f' AND v_cursor.attempt_count >= v_part.retry_limit AND v_part.keeps);
            v_drop := v_why = 'f' AND v_cursor.attempt_count >= v_part.retry_limit AND NOT v_part.keeps;
            IF v_dead THEN
                SELECT e INTO v_letter
                  FROM jsonb_array_elements(p_letters) e
                 WHERE (e->>'target')::integer = ord
                   AND v_offsets[(e->>'item')::integer + 1] = v_stop
                   AND substr(v_statuses, (e->>'item')::integer + 1, 1) = v_why
                 LIMIT 1;
                IF (v_letter->>'offset')::bigint IS DISTINCT FROM v_stop THEN
                    needs_payload := v_stop;
                    verdicts := NULL;
                    RETURN NEXT;
                    CONTINUE;
                END IF;
                INSERT INTO queen.log_dlq (tenant_id, queue_name, partition_name, partition_id,
                       consumer_group, "offset", message_id, transaction_id, trace_id, producer_sub,
                       payload, error, retry_count, created_at)
                VALUES (v_part.tenant_id, v_part.queue_name, v_part.partition_name, v_id,
                        v_group, v_stop, v_letter->>'messageId', v_letter->>'transactionId',
                        v_letter->>'traceId', v_letter->>'producerSub', v_letter->>'payload',
                        v_letter->>'error',
                        CASE WHEN v_cursor.attempt_offset = v_stop THEN v_cursor.attempt_count ELSE 0 END,
                        (v_letter->>'createdAt')::timestamptz)
                    ON CONFLICT (partition_id, consumer_group, "offset") DO NOTHING;
            END IF;
            -- Past the dead letter, unless a silent message below it still has to be delivered: then it
            -- comes again with those, and its dead letter stays the one it has.
            IF (v_dead OR v_drop) AND v_until = v_stop - 1 THEN
                v_until := v_stop;
            END IF;
        END IF;

        lease_released := v_cursor.batch_end IS NOT NULL
                          AND (v_stop IS NOT NULL OR v_until >= v_cursor.batch_end);
        IF v_stop IS NOT NULL OR v_until > v_cursor.committed THEN
            UPDATE queen.log_consumers c
               SET committed = v_until,
                   total_consumed = c.total_consumed + v_until - c.committed,
                   batch_end = CASE WHEN lease_released THEN NULL ELSE c.batch_end END,
                   worker_id = CASE WHEN lease_released THEN NULL ELSE c.worker_id END,
                   lease_expires_at = CASE WHEN lease_released THEN NULL ELSE c.lease_expires_at END,
                   batch_retry_count = CASE WHEN v_until >= v_cursor.batch_end THEN 0
                                            ELSE c.batch_retry_count END,
                   attempt_offset = CASE WHEN v_until >= v_cursor.attempt_offset THEN NULL
                                         ELSE v_cursor.attempt_offset END,
                   attempt_count = CASE WHEN v_until >= v_cursor.attempt_offset THEN 0
                                        ELSE v_cursor.attempt_count END
             WHERE c.partition_id = v_id AND c.consumer_group = v_group;
        END IF;
        IF lease_released THEN
            SELECT q.name, p.name, p.last_offset > v_until INTO queue_name, partition_name, has_more
              FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id
             WHERE p.id = v_id;
        END IF;

        SELECT string_agg(CASE
                 WHEN v_old[i] AND s = 'c' THEN 'n'
                 WHEN v_old[i] THEN 'a'
                 WHEN o IS NULL THEN 'u'
                 WHEN o = v_stop AND s = v_why AND v_dead THEN 'd'
                 WHEN o = v_stop AND s = v_why AND v_drop THEN 'z'
                 WHEN s <> 'c' THEN CASE WHEN s = 'd' THEN 'w' ELSE s END
                 WHEN o <= v_until THEN 'c'
                 ELSE 'w' END, '' ORDER BY i) INTO verdicts
          FROM unnest(v_offsets, string_to_array(v_statuses, NULL)) WITH ORDINALITY AS u(o, s, i);
        RETURN NEXT;
    END LOOP;
END $$;
