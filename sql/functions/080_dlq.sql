-- Dead letters. Whoever locks several of them does so by (failed_at, id), after partitions and cursors.

-- The ids of those that match, NULL matching all; failed in [p_from, p_to), newest first.
CREATE OR REPLACE FUNCTION queen.dlq_matching_v1(
    p_tenant uuid, p_queue text, p_group text, p_partition text, p_from timestamptz, p_to timestamptz)
RETURNS SETOF queen.log_dlq LANGUAGE sql STABLE AS $$
    SELECT d.* FROM queen.log_dlq d
     WHERE d.tenant_id = p_tenant
       AND (p_queue IS NULL OR d.queue_name = p_queue)
       AND (p_group IS NULL OR d.consumer_group = p_group)
       AND (p_partition IS NULL OR d.partition_name = p_partition)
       AND (p_from IS NULL OR d.failed_at >= p_from)
       AND (p_to IS NULL OR d.failed_at < p_to)
$$;

CREATE OR REPLACE FUNCTION queen.count_dlq_v1(
    p_tenant uuid, p_queue text, p_group text, p_partition text, p_from timestamptz, p_to timestamptz)
RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT count(*) FROM queen.dlq_matching_v1(p_tenant, p_queue, p_group, p_partition, p_from, p_to)
$$;

-- A page, newest first. It ends early where its payloads would pass p_max_bytes; one row always fits.
CREATE OR REPLACE FUNCTION queen.list_dlq_v1(
    p_tenant uuid, p_queue text, p_group text, p_partition text, p_from timestamptz, p_to timestamptz,
    p_limit bigint, p_offset bigint, p_max_bytes bigint)
RETURNS SETOF queen.log_dlq LANGUAGE sql STABLE AS $$
    WITH page AS (
        SELECT m.id, m.failed_at, octet_length(m.payload)::bigint AS bytes
          FROM queen.dlq_matching_v1(p_tenant, p_queue, p_group, p_partition, p_from, p_to) m
         ORDER BY m.failed_at DESC, m.id DESC
         LIMIT p_limit OFFSET p_offset
    ), bounded AS (
        SELECT page.id, sum(bytes) OVER (ORDER BY failed_at DESC, id DESC) - bytes AS before FROM page
    )
    SELECT d.* FROM bounded b JOIN queen.log_dlq d ON d.id = b.id
     WHERE b.before < p_max_bytes
     ORDER BY d.failed_at DESC, d.id DESC
$$;

-- The dead letters of one message, one a group at most for each of its offsets, newest first.
CREATE OR REPLACE FUNCTION queen.dlq_of_message_v1(
    p_tenant uuid, p_partition uuid, p_transaction text, p_group text)
RETURNS SETOF queen.log_dlq LANGUAGE sql STABLE AS $$
    SELECT d.* FROM queen.log_dlq d
     WHERE d.tenant_id = p_tenant AND d.partition_id = p_partition AND d.transaction_id = p_transaction
       AND (p_group IS NULL OR d.consumer_group = p_group)
     ORDER BY d.failed_at DESC, d.id DESC
$$;

-- Move a dead letter back into its queue and partition, as the one message that p_hash, p_raw_bytes and
-- p_blob are, encrypted or not as p_sealed says (see push_v1). moved: done. duplicate: a message of that
-- transactionId is in the partition already, and message_offset tells where; the dead letter is gone.
-- missing: there is no such dead letter, nor anything that it could have become.
CREATE OR REPLACE FUNCTION queen.replay_dlq_v1(
    p_tenant uuid, p_id uuid, p_queue text, p_partition text, p_hash bytea, p_raw_bytes integer,
    p_blob bytea, p_sealed boolean DEFAULT false)
RETURNS TABLE (verdict text, partition_id uuid, message_offset bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_pushed record;
BEGIN
    -- A queue that is being deleted takes its dead letters along: it is not made anew for one of them.
    PERFORM FROM queen.queues q WHERE q.tenant_id = p_tenant AND q.name = p_queue FOR KEY SHARE;
    IF EXISTS (SELECT FROM queen.log_dlq d WHERE d.id = p_id AND d.tenant_id = p_tenant) THEN
        PERFORM queen.lock_partitions_v1(p_tenant, ARRAY[p_queue], ARRAY[p_partition]);
        DELETE FROM queen.log_dlq d WHERE d.id = p_id;
        IF FOUND THEN
            SELECT * INTO v_pushed
              FROM queen.push_v1(p_tenant, ARRAY[p_queue], ARRAY[p_partition], ARRAY[1], ARRAY[p_raw_bytes],
                                 ARRAY[p_hash], ARRAY[p_blob], ARRAY[-1], ARRAY[NULL::uuid],
                                 ARRAY[NULL::timestamptz], ARRAY[p_sealed]);
            verdict := CASE WHEN v_pushed.base_offset IS NULL THEN 'duplicate' ELSE 'moved' END;
            partition_id := v_pushed.partition_id;
            message_offset := coalesce(v_pushed.base_offset, v_pushed.duplicate_of[1]);
            RETURN NEXT;
            RETURN;
        END IF;
    END IF;
    -- Somebody else was faster, or an earlier attempt of the caller committed and its answer was lost.
    SELECT p.id, queen.offset_of_hash_v1(p.id, p_hash) INTO partition_id, message_offset
      FROM queen.queues q JOIN queen.log_partitions p ON p.queue_id = q.id
     WHERE q.tenant_id = p_tenant AND q.name = p_queue AND p.name = p_partition;
    verdict := CASE WHEN message_offset IS NULL THEN 'missing' ELSE 'duplicate' END;
    RETURN NEXT;
END $$;

-- Put a message into the dead letters of a group by hand; p_letter is what the caller read from the
-- segment (see ack_v1). filed: it is there, the group is past it. leased: it is being worked on.
-- behind: messages before it are still to be delivered, and a cursor can't step over those. no_cursor: the
-- group has never popped from this partition. missing: the partition is gone.
CREATE OR REPLACE FUNCTION queen.file_dlq_v1(
    p_tenant uuid, p_partition uuid, p_group text, p_offset bigint, p_letter jsonb)
RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_part   record;
    v_cursor queen.log_consumers;
BEGIN
    SELECT p.name, q.name AS queue_name, p.log_start INTO v_part
      FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id
     WHERE p.id = p_partition AND q.tenant_id = p_tenant FOR KEY SHARE OF p;
    IF NOT FOUND THEN
        RETURN 'missing';
    END IF;
    -- Queue mode needs no first contact: it starts at the beginning whenever it comes.
    IF p_group = '__QUEUE_MODE__' THEN
        INSERT INTO queen.log_consumers (partition_id, consumer_group, committed)
        VALUES (p_partition, p_group, v_part.log_start - 1)
            ON CONFLICT DO NOTHING;
    END IF;
    SELECT * INTO v_cursor FROM queen.log_consumers c
     WHERE c.partition_id = p_partition AND c.consumer_group = p_group FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN 'no_cursor';
    END IF;
    IF p_offset > v_cursor.committed THEN
        IF v_cursor.batch_end IS NOT NULL AND v_cursor.lease_expires_at > clock_timestamp() THEN
            RETURN CASE WHEN p_offset <= v_cursor.batch_end THEN 'leased' ELSE 'behind' END;
        END IF;
        IF p_offset > greatest(v_cursor.committed + 1, v_part.log_start) THEN
            RETURN 'behind';
        END IF;
        UPDATE queen.log_consumers c
           SET committed = p_offset, total_consumed = c.total_consumed + p_offset - c.committed,
               batch_end = NULL, worker_id = NULL, lease_expires_at = NULL, batch_retry_count = 0,
               attempt_offset = NULL, attempt_count = 0
         WHERE c.partition_id = p_partition AND c.consumer_group = p_group;
    END IF;
    INSERT INTO queen.log_dlq (tenant_id, queue_name, partition_name, partition_id, consumer_group,
           "offset", message_id, transaction_id, trace_id, producer_sub, payload, error, retry_count,
           created_at)
    VALUES (p_tenant, v_part.queue_name, v_part.name, p_partition, p_group, p_offset,
            p_letter->>'messageId', p_letter->>'transactionId', p_letter->>'traceId',
            p_letter->>'producerSub', p_letter->>'payload', p_letter->>'error',
            CASE WHEN v_cursor.attempt_offset = p_offset THEN v_cursor.attempt_count ELSE 0 END,
            (p_letter->>'createdAt')::timestamptz)
        ON CONFLICT (partition_id, consumer_group, "offset") DO NOTHING;
    RETURN 'filed';
END $$;

-- Delete the dead letters of one message; returns how many there were.
CREATE OR REPLACE FUNCTION queen.delete_dlq_v1(
    p_tenant uuid, p_partition uuid, p_transaction text, p_group text)
RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_count bigint;
BEGIN
    DELETE FROM queen.log_dlq d WHERE d.id IN (
        SELECT l.id FROM queen.log_dlq l
         WHERE l.tenant_id = p_tenant AND l.partition_id = p_partition
           AND l.transaction_id = p_transaction AND (p_group IS NULL OR l.consumer_group = p_group)
         ORDER BY l.failed_at, l.id FOR UPDATE);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END $$;

-- Delete up to p_limit of a queue's dead letters, oldest first; returns how many it deleted.
CREATE OR REPLACE FUNCTION queen.purge_dlq_v1(
    p_tenant uuid, p_queue text, p_group text, p_partition text, p_from timestamptz, p_to timestamptz,
    p_limit bigint)
RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_count bigint;
BEGIN
    DELETE FROM queen.log_dlq d WHERE d.id IN (
        SELECT l.id FROM queen.log_dlq l
         WHERE l.tenant_id = p_tenant AND l.queue_name = p_queue
           AND (p_group IS NULL OR l.consumer_group = p_group)
           AND (p_partition IS NULL OR l.partition_name = p_partition)
           AND (p_from IS NULL OR l.failed_at >= p_from) AND (p_to IS NULL OR l.failed_at < p_to)
         ORDER BY l.failed_at, l.id LIMIT p_limit FOR UPDATE);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END $$;
