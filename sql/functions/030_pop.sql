-- The subscription point of a group: the stored one wins, else the pop's own is stored now. Queue mode
-- starts at the beginning and stores nothing. p_waited_ms is how long ago the pop arrived when the caller
-- sent this: the point is the arrival, so that the push which woke a parked pop is behind it (spec 8.3).
-- Counted from now(), when this call came in, not from when we got so far: first calls compile for long.
CREATE OR REPLACE FUNCTION queen.subscribe_v1(
    p_tenant uuid, p_queue text, p_namespace text, p_task text, p_group text,
    p_mode text, p_from timestamptz, p_waited_ms integer, OUT point timestamptz, OUT is_first boolean)
LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    is_first := false;
    IF p_group = '__QUEUE_MODE__' THEN
        point := '-infinity';
        RETURN;
    END IF;
    LOOP
        SELECT m.subscription_timestamp INTO point
          FROM queen.consumer_groups_metadata m
         WHERE m.tenant_id = p_tenant AND m.consumer_group = p_group
           AND m.queue_name = p_queue AND m.namespace = p_namespace AND m.task = p_task;
        IF FOUND THEN
            RETURN;
        END IF;
        point := CASE
            WHEN p_from IS NOT NULL THEN p_from
            WHEN p_mode = 'all' THEN '-infinity'
            ELSE now() - make_interval(secs => p_waited_ms / 1000.0) END;
        INSERT INTO queen.consumer_groups_metadata
               (tenant_id, queue_name, namespace, task, consumer_group, subscription_mode,
                subscription_timestamp)
        VALUES (p_tenant, p_queue, p_namespace, p_task, p_group, p_mode, point)
            ON CONFLICT DO NOTHING;
        IF FOUND THEN
            is_first := true;
            RETURN;
        END IF;
    END LOOP;
END $$;

-- Partitions that a pop or a probe may look at: those of one queue, one partition of it, or, for a
-- discovery pop (p_queue NULL), of every queue with that namespace and task ('' matches all). p_candidates
-- narrows a whole queue down to these partitions.
CREATE OR REPLACE FUNCTION queen.pop_partitions_v1(
    p_tenant uuid, p_queue text, p_partition text, p_namespace text, p_task text,
    p_candidates text[] DEFAULT NULL)
RETURNS TABLE (id uuid, name text, queue_id uuid, last_offset bigint, log_start bigint,
               last_created_at timestamptz)
LANGUAGE plpgsql STABLE ROWS 64 SET enable_seqscan = off AS $$
BEGIN
    IF p_queue IS NULL THEN
        RETURN QUERY
        SELECT p.id, p.name, p.queue_id, p.last_offset, p.log_start, p.last_created_at
          FROM queen.queues q JOIN queen.log_partitions p ON p.queue_id = q.id
         WHERE q.tenant_id = p_tenant
           AND (p_namespace = '' OR q.namespace = p_namespace) AND (p_task = '' OR q.task = p_task);
    ELSIF p_partition IS NOT NULL OR p_candidates IS NOT NULL THEN
        RETURN QUERY
        SELECT p.id, p.name, p.queue_id, p.last_offset, p.log_start, p.last_created_at
          FROM queen.queues q
         CROSS JOIN unnest(coalesce(p_candidates, ARRAY[p_partition])) AS k(name)
         CROSS JOIN LATERAL (SELECT * FROM queen.log_partitions p
                              WHERE p.queue_id = q.id AND p.name = k.name OFFSET 0) p
         WHERE q.tenant_id = p_tenant AND q.name = p_queue;
    ELSE
        RETURN QUERY
        SELECT p.id, p.name, p.queue_id, p.last_offset, p.log_start, p.last_created_at
          FROM queen.queues q JOIN queen.log_partitions p ON p.queue_id = q.id
         WHERE q.tenant_id = p_tenant AND q.name = p_queue;
    END IF;
END $$;

-- Claim messages for one consumer (spec 1, "Pop").
--
-- Takes up to p_partitions partitions (NULL: no cap) that no live lease holds, the least recently claimed
-- first, until p_batch messages or p_max_bytes are together. A partition locked by another pop is skipped,
-- never waited for. p_lease_id names the lease of all of them; p_auto_ack commits the cursors instead.
-- p_lease_seconds NULL means the queue's own.
--
-- One row for each segment of the claim, in partition and offset order. The claim of a partition is
-- (committed, batch_end], with batch_end that of the partition's last row.
--
-- With p_candidates, which began with candidates_v1, only these partitions of the queue are looked at, and
-- each that exists gets a row without a blob, its verdict: t took (leased for until_ms), l nothing before
-- until_ms (leased, or hidden by a delay), e empty (now, where autoAck took it), r ask again (no room left,
-- not all taken with autoAck, or, after until_ms, locked by another).
CREATE OR REPLACE FUNCTION queen.pop_v1(
    p_tenant uuid, p_queue text, p_partition text, p_namespace text, p_task text, p_group text,
    p_batch integer, p_partitions integer, p_lease_seconds integer, p_auto_ack boolean, p_lease_id text,
    p_mode text, p_from timestamptz, p_waited_ms integer, p_max_bytes bigint, p_candidates text[])
RETURNS TABLE (partition_id uuid, partition_name text, queue_name text, committed bigint,
               batch_end bigint, delivery_attempt integer, base_offset bigint, created_at timestamptz,
               blob bytea, verdict text, until_ms bigint)
LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    v_now      timestamptz := clock_timestamp();
    v_point    timestamptz;
    v_first    boolean;                -- the group was unknown
    v_durable  boolean := p_auto_ack;  -- this call writes what a crash must not take
    v_single   boolean := false;       -- it is one candidate, and its cursor is locked already
    v_look     refcursor;  -- otherwise, the partitions that it may take, or tells about
    v_part     record;
    v_id       uuid;       -- the partition at hand
    v_lease    integer;    -- leaseTime, minPopWaitTime, delayedProcessing and windowBuffer of its queue
    v_pause    integer;
    v_delay    integer;
    v_window   integer;
    v_acquired timestamptz;
    v_start    bigint;     -- the first offset that this claim may take
    v_last     bigint;     -- the last one that there is
    v_rest     refcursor;  -- the segments behind the first one
    v_end      bigint;     -- the last offset of a segment
    v_bytes    bigint;     -- its size, and that of a message of it
    v_average  bigint;
    v_next     bigint;     -- the next offset to take
    v_from     bigint;     -- the next offset that this segment has
    v_take     bigint;
    v_taken    integer := 0;    -- partitions
    v_left     bigint := p_batch;
    v_room     bigint := p_max_bytes;
    v_verdict  text;       -- on the partition at hand, see above
    v_until    timestamptz;
BEGIN
    -- Mostly it is one candidate that has something, and one statement finds all.
    IF cardinality(p_candidates) = 1 AND least(p_batch, p_partitions, p_max_bytes) > 0 THEN
        SELECT p.id, p.log_start, p.last_offset, q.name, q.lease_time, q.min_pop_wait_time,
               q.delayed_processing, q.window_buffer, c.committed, c.batch_retry_count + 1,
               c.lease_acquired_at
          INTO v_id, v_start, v_last, queue_name, v_lease, v_pause, v_delay, v_window, committed,
               delivery_attempt, v_acquired
          FROM (SELECT q.id, q.name, q.lease_time, q.min_pop_wait_time, q.delayed_processing, q.window_buffer
                  FROM queen.queues q WHERE q.tenant_id = p_tenant AND q.name = p_queue OFFSET 0) q
         CROSS JOIN LATERAL (SELECT p.id, p.log_start, p.last_offset FROM queen.log_partitions p
                              WHERE p.queue_id = q.id AND p.name = p_candidates[1] OFFSET 0) p
         CROSS JOIN LATERAL (SELECT c.committed, c.batch_retry_count, c.lease_acquired_at
                               FROM queen.log_consumers c
                              WHERE c.partition_id = p.id AND c.consumer_group = p_group
                                AND p.last_offset >= p.log_start AND p.last_offset > c.committed
                                AND (c.batch_end IS NULL OR c.lease_expires_at <= v_now)
                                FOR NO KEY UPDATE SKIP LOCKED) c;
        v_single := FOUND;
        partition_id := v_id;
        partition_name := p_candidates[1];
    END IF;
    IF NOT v_single THEN
        -- candidates_v1 has subscribed the group, and who ends a subscription deletes the cursors too: with
        -- candidates, only one without a cursor asks for the point.
        IF p_candidates IS NULL THEN
            SELECT s.point, s.is_first INTO v_point, v_first
              FROM queen.subscribe_v1(p_tenant, coalesce(p_queue, ''), coalesce(p_namespace, ''),
                                      coalesce(p_task, ''), p_group, p_mode, p_from, p_waited_ms) s;
            v_durable := v_durable OR v_first;
        END IF;
        OPEN v_look NO SCROLL FOR
        SELECT p.id, p.name, p.queue_id, p.last_created_at, c.partition_id IS NULL AS unseeded, n.pending,
               n.leased_until
          FROM queen.pop_partitions_v1(p_tenant, p_queue, p_partition, p_namespace, p_task,
                                       p_candidates) p
          LEFT JOIN LATERAL (SELECT * FROM queen.log_consumers c
                              WHERE c.partition_id = p.id AND c.consumer_group = p_group OFFSET 0) c ON true
         CROSS JOIN LATERAL (SELECT
                p.last_offset >= p.log_start
                AND CASE WHEN c.partition_id IS NULL THEN v_point IS NULL OR p.last_created_at >= v_point
                         ELSE p.last_offset > c.committed END AS pending,
                CASE WHEN c.batch_end IS NOT NULL AND c.lease_expires_at > v_now
                     THEN c.lease_expires_at END AS leased_until) n
         WHERE p_candidates IS NOT NULL OR (n.pending AND n.leased_until IS NULL)
         ORDER BY c.lease_acquired_at NULLS FIRST, p.id;
    END IF;

    LOOP
        IF NOT v_single THEN
            FETCH v_look INTO v_part;
            EXIT WHEN NOT FOUND
                      OR p_candidates IS NULL AND (v_left <= 0 OR v_room <= 0 OR v_taken >= p_partitions);
            v_id := v_part.id;
            partition_id := v_id;
            partition_name := v_part.name;
        END IF;
        verdict := NULL;
        until_ms := NULL;
        v_verdict := 'r';
        v_until := NULL;
        <<look>>
        BEGIN
            IF NOT v_single THEN
                IF v_part.unseeded AND v_point IS NULL THEN
                    SELECT s.point, s.is_first INTO v_point, v_first
                      FROM queen.subscribe_v1(p_tenant, p_queue, '', '', p_group, p_mode, p_from,
                                              p_waited_ms) s;
                    v_durable := v_durable OR v_first;
                END IF;
                IF NOT v_part.pending OR v_part.unseeded AND v_part.last_created_at < v_point THEN
                    v_verdict := 'e';
                    EXIT look;
                ELSIF v_part.leased_until IS NOT NULL THEN
                    v_verdict := 'l';
                    v_until := v_part.leased_until;
                    EXIT look;
                END IF;
                EXIT look WHEN v_left <= 0 OR v_room <= 0 OR v_taken >= p_partitions;
                IF v_part.unseeded THEN
                    -- A partition that is just being deleted is skipped: waiting for it could deadlock, and
                    -- its end would break the foreign key. So is the whole of it when the group is being
                    -- deleted: a cursor that outlived its subscription would hide messages from the next one.
                    INSERT INTO queen.log_consumers (partition_id, consumer_group, committed)
                    SELECT p.id, p_group, greatest(queen.first_offset_since_v1(p.id, v_point), p.log_start) - 1
                      FROM queen.log_partitions p
                     WHERE p.id = v_id
                       AND (p_group = '__QUEUE_MODE__' OR EXISTS (
                            SELECT FROM queen.consumer_groups_metadata m
                             WHERE m.tenant_id = p_tenant AND m.consumer_group = p_group
                               AND m.queue_name = coalesce(p_queue, '')
                               AND m.namespace = coalesce(p_namespace, '') AND m.task = coalesce(p_task, '')
                               AND m.subscription_timestamp = v_point
                               FOR KEY SHARE SKIP LOCKED))
                       FOR KEY SHARE OF p SKIP LOCKED
                        ON CONFLICT DO NOTHING;
                    v_durable := true;
                END IF;
                SELECT p.log_start, p.last_offset, q.name, q.lease_time, q.min_pop_wait_time,
                       q.delayed_processing, q.window_buffer, c.committed, c.batch_retry_count + 1,
                       c.lease_acquired_at
                  INTO v_start, v_last, queue_name, v_lease, v_pause, v_delay, v_window, committed,
                       delivery_attempt, v_acquired
                  FROM queen.log_partitions p, queen.queues q, queen.log_consumers c
                 WHERE p.id = v_id AND q.id = v_part.queue_id
                   AND c.partition_id = v_id AND c.consumer_group = p_group
                   AND p.last_offset > c.committed
                   AND (c.batch_end IS NULL OR c.lease_expires_at <= v_now)
                   FOR NO KEY UPDATE OF c SKIP LOCKED;
                IF NOT FOUND THEN
                    v_until := v_now + interval '20 milliseconds';  -- let the other one finish
                    EXIT look;
                END IF;
            END IF;
            -- minPopWaitTime: so many seconds between two claims of one (partition, group).
            IF v_pause > 0 THEN
                v_until := v_acquired + make_interval(secs => v_pause);
                IF v_until > v_now THEN
                    v_verdict := 'l';
                    EXIT look;
                END IF;
                v_until := NULL;
            END IF;

            -- Retention may have passed the cursor: the claim takes it along to what is left of the log.
            v_start := greatest(committed + 1, v_start);
            v_next := v_start;
            committed := v_start - 1;
            SELECT s.base_offset, s.end_offset, s.raw_bytes, s.created_at, s.blob
              INTO base_offset, v_end, v_bytes, created_at, blob
              FROM queen.log_segments s
             WHERE s.partition_id = v_id AND s.base_offset <= v_start
             ORDER BY s.base_offset DESC LIMIT 1;
            LOOP
                IF v_end >= v_next THEN
                    -- windowBuffer holds a partition until its oldest pending message has waited so long;
                    -- delayedProcessing hides each message until it is that old. Without either nothing is
                    -- hidden: after a clock has stepped back, created_at is ahead of it.
                    IF v_delay + v_window > 0 THEN
                        v_until := created_at + make_interval(secs => greatest(
                            v_delay, CASE WHEN v_next = v_start THEN v_window END));
                        EXIT WHEN v_until > v_now;
                    END IF;
                    v_from := greatest(v_next, base_offset);
                    v_take := least(v_end - v_from + 1, v_left);
                    -- A segment that is larger than the room left counts by its average message; the first
                    -- message of an answer always fits.
                    v_average := greatest(v_bytes / (v_end - base_offset + 1), 1);
                    IF v_take * v_average > v_room THEN
                        v_take := greatest(v_room / v_average,
                                           CASE WHEN v_room = p_max_bytes THEN 1 ELSE 0 END);
                        EXIT WHEN v_take <= 0;
                    END IF;
                    v_next := v_from + v_take;
                    v_left := v_left - v_take;
                    v_room := v_room - v_take * v_average;
                    batch_end := v_next - 1;
                    RETURN NEXT;
                    EXIT WHEN v_left <= 0 OR v_next <= v_end OR v_next > v_last;
                END IF;
                IF v_rest IS NULL THEN
                    OPEN v_rest NO SCROLL FOR
                    SELECT s.base_offset, s.end_offset, s.raw_bytes, s.created_at, s.blob
                      FROM queen.log_segments s
                     WHERE s.partition_id = v_id
                       AND s.base_offset >= v_next AND s.base_offset < v_next + v_left
                     ORDER BY s.base_offset;
                END IF;
                FETCH v_rest INTO base_offset, v_end, v_bytes, created_at, blob;
                EXIT WHEN NOT FOUND;
            END LOOP;
            IF v_rest IS NOT NULL THEN
                CLOSE v_rest;
                v_rest := NULL;
            END IF;
            IF v_next = v_start THEN
                v_verdict := CASE WHEN v_until > v_now THEN 'l' ELSE 'r' END;
                EXIT look;
            END IF;

            v_taken := v_taken + 1;
            IF p_auto_ack THEN
                v_verdict := CASE WHEN v_next > v_last THEN 'e' ELSE 'r' END;
                v_until := NULL;
                UPDATE queen.log_consumers c
                   SET committed = v_next - 1, batch_end = NULL, worker_id = NULL, lease_expires_at = NULL,
                       lease_acquired_at = v_now, batch_retry_count = 0, attempt_offset = NULL,
                       attempt_count = 0, total_consumed = c.total_consumed + v_next - v_start
                 WHERE c.partition_id = v_id AND c.consumer_group = p_group;
            ELSE
                v_verdict := 't';
                v_until := v_now + make_interval(secs => coalesce(p_lease_seconds, v_lease));
                UPDATE queen.log_consumers c
                   SET committed = v_start - 1, batch_end = v_next - 1, worker_id = p_lease_id,
                       lease_acquired_at = v_now, lease_expires_at = v_until,
                       batch_retry_count = delivery_attempt
                 WHERE c.partition_id = v_id AND c.consumer_group = p_group;
            END IF;
        END look;

        IF p_candidates IS NOT NULL THEN
            blob := NULL;
            verdict := v_verdict;
            until_ms := CASE WHEN v_verdict <> 'e'
                             THEN ceil(extract(epoch FROM v_until - clock_timestamp()) * 1000) END;
            RETURN NEXT;
        END IF;
        EXIT WHEN v_single;
    END LOOP;
    IF NOT v_single THEN
        CLOSE v_look;
    END IF;

    -- Losing a lease in a crash only redelivers, as an expiry does: no need to wait for the disk. A cursor
    -- says more: until it is there again, other groups' cursors alone would tell what is completed.
    IF NOT v_durable THEN
        SET LOCAL synchronous_commit = off;
    END IF;
END $$;

-- All partitions of a queue that may have something for a group, now or later (leased and hidden ones too):
-- what a hot-list starts with. Subscribes the group like a pop. At most p_most; one more row tells that
-- there are more.
CREATE OR REPLACE FUNCTION queen.candidates_v1(
    p_tenant uuid, p_queue text, p_group text, p_mode text, p_from timestamptz, p_waited_ms integer,
    p_most bigint)
RETURNS TABLE (partition_name text) LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_point timestamptz;
BEGIN
    SELECT s.point INTO v_point
      FROM queen.subscribe_v1(p_tenant, p_queue, '', '', p_group, p_mode, p_from, p_waited_ms) s;
    RETURN QUERY
    SELECT p.name
      FROM queen.pop_partitions_v1(p_tenant, p_queue, NULL, '', '') p
      LEFT JOIN LATERAL (SELECT * FROM queen.log_consumers c
                          WHERE c.partition_id = p.id AND c.consumer_group = p_group OFFSET 0) c ON true
     WHERE p.last_offset >= p.log_start
       AND CASE WHEN c.partition_id IS NULL THEN p.last_created_at >= v_point
                ELSE p.last_offset > c.committed END
     ORDER BY c.lease_acquired_at NULLS FIRST, p.id
     LIMIT p_most + 1;
END $$;

-- What others may have done of which no hint told: partitions written in the last p_seconds (2 s more, since
-- last_write_at moves once a second), and queues with cursor moves recorded (10 s more: a commit may be
-- late). partition_name NULL: the whole queue.
CREATE OR REPLACE FUNCTION queen.changes_v1(p_tenant uuid, p_seconds float8, p_most bigint)
RETURNS TABLE (queue_name text, partition_name text) LANGUAGE sql STABLE SET enable_seqscan = off AS $$
    (SELECT q.name, p.name
       FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id
      WHERE p.last_write_at > clock_timestamp() - make_interval(secs => p_seconds + 2)
        AND q.tenant_id = p_tenant
      LIMIT p_most)
    UNION ALL
    (SELECT DISTINCT r.queue_name, NULL
       FROM queen.log_repairs r
      WHERE r.moved_at > clock_timestamp() - make_interval(secs => p_seconds + 10)
        AND r.tenant_id = p_tenant)
$$;

-- Record that cursors of a queue have moved other than by acks, so that every broker looks again (spec 4.3:
-- the durable repair marker). What is an hour old goes.
CREATE OR REPLACE FUNCTION queen.record_move_v1(p_tenant uuid, p_queue text)
RETURNS void LANGUAGE sql AS $$
    DELETE FROM queen.log_repairs r WHERE r.moved_at < clock_timestamp() - interval '1 hour';
    INSERT INTO queen.log_repairs (tenant_id, queue_name) VALUES (p_tenant, p_queue);
$$;

-- What each of many parked pops could get: how many partitions would serve it now (p_limits[i] at most), and
-- in how many milliseconds the next one will, once its lease has run out, its first pending message is old
-- enough, or minPopWaitTime is over; NULL: nothing is in sight. Rows only for pops that have either. Reads
-- only: the pop itself subscribed its group when it arrived.
CREATE OR REPLACE FUNCTION queen.probe_v1(
    p_tenant uuid, p_queues text[], p_partitions text[], p_namespaces text[], p_tasks text[],
    p_groups text[], p_limits integer[])
RETURNS TABLE (ord integer, available integer, due_ms bigint)
LANGUAGE sql STABLE SET enable_seqscan = off AS $$
    SELECT k.ord::integer, least(n.available, k.lim)::integer,
           ceil(extract(epoch FROM n.due - clock_timestamp()) * 1000)::bigint
      FROM unnest(p_queues, p_partitions, p_namespaces, p_tasks, p_groups, p_limits)
           WITH ORDINALITY AS k(queue, partition, namespace, task, grp, lim, ord)
     CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE w.until IS NULL OR w.until <= clock_timestamp()) AS available,
               min(w.until) FILTER (WHERE w.until > clock_timestamp()) AS due
          FROM queen.pop_partitions_v1(p_tenant, k.queue, k.partition, k.namespace, k.task) p
          JOIN queen.queues q ON q.id = p.queue_id
          LEFT JOIN LATERAL (SELECT * FROM queen.log_consumers c
                              WHERE c.partition_id = p.id AND c.consumer_group = k.grp OFFSET 0) c ON true
         CROSS JOIN LATERAL (SELECT greatest(
                CASE WHEN c.batch_end IS NOT NULL THEN c.lease_expires_at END,
                CASE WHEN q.min_pop_wait_time > 0
                     THEN c.lease_acquired_at + make_interval(secs => q.min_pop_wait_time) END,
                CASE WHEN q.delayed_processing > 0 OR q.window_buffer > 0 THEN (
                     SELECT s.created_at FROM queen.log_segments s
                      WHERE s.partition_id = p.id
                        AND s.base_offset >= coalesce(
                             (SELECT f.base_offset FROM queen.log_segments f
                               WHERE f.partition_id = p.id AND f.base_offset <= c.committed + 1
                               ORDER BY f.base_offset DESC LIMIT 1), 0)
                        AND s.end_offset > coalesce(c.committed, -1)
                      ORDER BY s.base_offset LIMIT 1
                     ) + make_interval(secs => greatest(q.delayed_processing, q.window_buffer)) END
                ) AS until) w
         WHERE p.last_offset >= p.log_start
           AND CASE WHEN c.partition_id IS NULL THEN
                         k.grp = '__QUEUE_MODE__' OR p.last_created_at >= (
                            SELECT m.subscription_timestamp FROM queen.consumer_groups_metadata m
                             WHERE m.tenant_id = p_tenant AND m.consumer_group = k.grp
                               AND m.queue_name = coalesce(k.queue, '')
                               AND m.namespace = k.namespace AND m.task = k.task)
                    ELSE p.last_offset > c.committed END) n
     WHERE n.available > 0 OR n.due IS NOT NULL
$$;

-- Give back a claim whose answer could not be written: the lease ends now, at no cost to the batch.
CREATE OR REPLACE FUNCTION queen.release_v1(p_lease_id text)
RETURNS integer LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_count integer;
BEGIN
    PERFORM FROM queen.log_consumers c WHERE c.worker_id = p_lease_id
      ORDER BY c.partition_id, c.consumer_group FOR NO KEY UPDATE;
    UPDATE queen.log_consumers c
       SET batch_end = NULL, worker_id = NULL, lease_expires_at = NULL,
           batch_retry_count = greatest(c.batch_retry_count - 1, 0)
     WHERE c.worker_id = p_lease_id;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END $$;

-- Extend every live row of a lease to p_seconds from now: never shortened, never revived.
-- Returns the earliest expiry, NULL when nothing was live.
CREATE OR REPLACE FUNCTION queen.extend_v1(p_lease_id text, p_seconds integer)
RETURNS TABLE (renewed integer, expires_at timestamptz) LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    PERFORM FROM queen.log_consumers c WHERE c.worker_id = p_lease_id
      ORDER BY c.partition_id, c.consumer_group FOR NO KEY UPDATE;
    RETURN QUERY
    WITH live AS (
        UPDATE queen.log_consumers c
           SET lease_expires_at = greatest(c.lease_expires_at, v_now + make_interval(secs => p_seconds))
         WHERE c.worker_id = p_lease_id AND c.batch_end IS NOT NULL AND c.lease_expires_at > v_now
     RETURNING c.lease_expires_at AS expiry)
    SELECT count(*)::integer, min(expiry) FROM live;
END $$;
