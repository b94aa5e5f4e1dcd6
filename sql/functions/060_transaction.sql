-- Pushes and acknowledgements, all or nothing (spec 2, "transaction"): the arrays of push_v1 and those of
-- ack_v1, plus leases that must be live. Locks like both: partitions ascending, then cursors.
--
-- committed false means that nothing was written; pushes and acks (arrays of the rows that push_v1 and
-- ack_v1 gave) then tell why: duplicates, refused acks, a payload that a dead letter needs (the caller
-- reads it and calls again). lost_lease names a required lease that is not live.
CREATE OR REPLACE FUNCTION queen.transaction_v1(
    p_tenant uuid, p_queues text[], p_partitions text[], p_counts integer[], p_raw_bytes integer[],
    p_hashes bytea[], p_blobs bytea[], p_ack_partitions uuid[], p_ack_groups text[], p_ack_leases text[],
    p_ack_hashes bytea[], p_ack_statuses text[], p_letters jsonb, p_required_leases text[],
    p_sealed boolean[] DEFAULT NULL)
RETURNS TABLE (committed boolean, pushes jsonb, acks jsonb, lost_lease text)
LANGUAGE plpgsql AS $$
DECLARE
    v_unknown constant bigint[] := array_fill(-1::bigint, ARRAY[cardinality(p_queues)]);
    v_refused constant text := CASE WHEN cardinality(p_queues) > 0 THEN '[^cfrdz]' ELSE '[^cnfrdz]' END;
BEGIN
    pushes := '[]';
    acks := '[]';
    BEGIN
        IF cardinality(p_queues) > 0 THEN
            SELECT jsonb_agg(to_jsonb(p) ORDER BY p.ord) INTO pushes
              FROM queen.push_v1(p_tenant, p_queues, p_partitions, p_counts, p_raw_bytes, p_hashes,
                                 p_blobs, v_unknown, array_fill(NULL::uuid, ARRAY[cardinality(p_queues)]),
                                 array_fill(NULL::timestamptz, ARRAY[cardinality(p_queues)]), p_sealed) p;
            IF jsonb_path_exists(pushes, '$[*] ? (@.base_offset == null)') THEN
                RAISE EXCEPTION 'duplicate' USING ERRCODE = 'QT001';
            END IF;
        END IF;
        -- One pass over all cursors that this touches, in the one order, before any is judged.
        PERFORM FROM queen.log_consumers c
          WHERE c.worker_id = ANY (p_required_leases)
             OR (c.partition_id, c.consumer_group) IN (SELECT * FROM unnest(p_ack_partitions, p_ack_groups))
          ORDER BY c.partition_id, c.consumer_group
            FOR NO KEY UPDATE;
        SELECT l.id INTO lost_lease
          FROM unnest(p_required_leases) AS l(id)
         WHERE NOT EXISTS (SELECT FROM queen.log_consumers c
                            WHERE c.worker_id = l.id AND c.batch_end IS NOT NULL
                              AND c.lease_expires_at > clock_timestamp())
         LIMIT 1;
        IF lost_lease IS NOT NULL THEN
            RAISE EXCEPTION 'lost lease' USING ERRCODE = 'QT001';
        END IF;
        IF cardinality(p_ack_partitions) > 0 THEN
            SELECT jsonb_agg(to_jsonb(a) ORDER BY a.ord) INTO acks
              FROM queen.ack_v1(p_ack_partitions, p_ack_groups, p_ack_leases, NULL, p_ack_hashes,
                                p_ack_statuses, p_letters) a;
            -- An ack that changes nothing would let the pushes happen a second time.
            IF EXISTS (SELECT FROM jsonb_array_elements(acks) a
                        WHERE a->>'verdicts' IS NULL OR a->>'verdicts' ~ v_refused) THEN
                RAISE EXCEPTION 'refused ack' USING ERRCODE = 'QT001';
            END IF;
        END IF;
        committed := true;
    EXCEPTION WHEN SQLSTATE 'QT001' THEN
        committed := false;
    END;
    RETURN NEXT;
END $$;
