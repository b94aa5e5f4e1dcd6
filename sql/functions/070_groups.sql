-- What each group is subscribed to, one row for each (group, queue): subscriptions by name, whether or not
-- that queue exists yet (queue_id NULL), and discovery subscriptions for each queue that they match
-- (queue_name '' while they match none). Of several the earliest counts: that is what the group gets.
-- Queue mode needs no subscription; it counts as one, to everything, where it has a cursor or was asked for.
CREATE OR REPLACE FUNCTION queen.subscriptions_v1(p_tenant uuid, p_group text, p_queue text)
RETURNS TABLE (consumer_group text, queue_name text, queue_id uuid, mode text, point timestamptz,
               subscribed_at timestamptz)
LANGUAGE sql STABLE AS $$
    SELECT DISTINCT ON (s.consumer_group, s.queue_name)
           s.consumer_group, s.queue_name, s.queue_id, s.mode, s.point, s.subscribed_at
      FROM (
        SELECT m.consumer_group, m.queue_name, q.id AS queue_id, m.subscription_mode AS mode,
               m.subscription_timestamp AS point, m.created_at AS subscribed_at
          FROM queen.consumer_groups_metadata m
          LEFT JOIN queen.queues q ON q.tenant_id = m.tenant_id AND q.name = m.queue_name
         WHERE m.tenant_id = p_tenant AND m.queue_name <> ''
        UNION ALL
        SELECT m.consumer_group, coalesce(q.name, ''), q.id, m.subscription_mode,
               m.subscription_timestamp, m.created_at
          FROM queen.consumer_groups_metadata m
          LEFT JOIN queen.queues q ON q.tenant_id = m.tenant_id
                AND (m.namespace = '' OR q.namespace = m.namespace) AND (m.task = '' OR q.task = m.task)
         WHERE m.tenant_id = p_tenant AND m.queue_name = ''
        UNION ALL
        SELECT '__QUEUE_MODE__', q.name, q.id, 'all', '-infinity', NULL
          FROM queen.queues q
         WHERE q.tenant_id = p_tenant
           AND (p_group = '__QUEUE_MODE__' AND q.name = p_queue
                OR EXISTS (SELECT FROM queen.log_partitions p JOIN queen.log_consumers c ON c.partition_id = p.id
                            WHERE p.queue_id = q.id AND c.consumer_group = '__QUEUE_MODE__'))) s
     WHERE (p_group IS NULL OR s.consumer_group = p_group) AND (p_queue IS NULL OR s.queue_name = p_queue)
     ORDER BY s.consumer_group, s.queue_name, s.point
$$;

-- Where each group stands in each partition of the queues it reads: its cursor, or, where it has none yet,
-- the place at which its first pop will put one (the rule is pop_v1's). lag counts the messages from
-- next_offset on. Offset arithmetic; first_offset_since_v1 is asked only where the subscription point lies
-- between the partition's oldest and its newest message.
CREATE OR REPLACE FUNCTION queen.group_positions_v1(p_tenant uuid, p_group text, p_queue text)
RETURNS TABLE (consumer_group text, queue_id uuid, partition_id uuid, partition_name text,
               last_offset bigint, next_offset bigint, lag bigint, has_cursor boolean, worker_id text,
               lease_expires_at timestamptz, batch_end bigint, deliveries integer, failures integer,
               total_consumed bigint, active_at timestamptz)
LANGUAGE sql STABLE AS $$
    SELECT c.consumer_group, p.queue_id, p.id, p.name, p.last_offset,
           greatest(c.committed + 1, p.log_start),
           greatest(p.last_offset + 1 - greatest(c.committed + 1, p.log_start), 0), true, c.worker_id,
           c.lease_expires_at, c.batch_end, c.batch_retry_count, c.attempt_count, c.total_consumed,
           c.lease_acquired_at
      FROM queen.queues q
      JOIN queen.log_partitions p ON p.queue_id = q.id
      JOIN queen.log_consumers c ON c.partition_id = p.id
     WHERE q.tenant_id = p_tenant AND (p_queue IS NULL OR q.name = p_queue)
       AND (p_group IS NULL OR c.consumer_group = p_group)
    UNION ALL
    SELECT s.consumer_group, p.queue_id, p.id, p.name, p.last_offset, n.next_offset,
           p.last_offset + 1 - n.next_offset, false, NULL, NULL, NULL, 0, 0, 0, NULL
      FROM queen.subscriptions_v1(p_tenant, p_group, p_queue) s
      JOIN queen.log_partitions p ON p.queue_id = s.queue_id
     CROSS JOIN LATERAL (SELECT CASE
            WHEN p.last_created_at < s.point THEN p.last_offset + 1
            WHEN p.oldest_live_at >= s.point THEN p.log_start
            ELSE greatest(queen.first_offset_since_v1(p.id, s.point), p.log_start) END AS next_offset) n
     WHERE NOT EXISTS (SELECT FROM queen.log_consumers c
                        WHERE c.partition_id = p.id AND c.consumer_group = s.consumer_group)
$$;

-- When the message at an offset was created; NULL for one that isn't there.
CREATE OR REPLACE FUNCTION queen.created_at_v1(p_partition uuid, p_offset bigint)
RETURNS timestamptz LANGUAGE sql STABLE AS $$
    SELECT s.created_at FROM queen.log_segments s
     WHERE s.partition_id = p_partition AND s.base_offset <= p_offset
     ORDER BY s.base_offset DESC LIMIT 1
$$;

-- One row for each (group, queue). members: live leases; oldest_pending_at: the creation of the oldest
-- message that it owes; active_at: its last claim. A group that subscribed to what doesn't exist yet has a
-- row without partitions, so that a durable subscription can be seen.
CREATE OR REPLACE FUNCTION queen.list_groups_v1(p_tenant uuid, p_group text, p_queue text)
RETURNS TABLE (consumer_group text, queue_name text, mode text, point timestamptz,
               subscribed_at timestamptz, partitions bigint, members bigint, total_lag bigint,
               partitions_with_lag bigint, oldest_pending_at timestamptz, active_at timestamptz,
               total_consumed bigint)
LANGUAGE sql STABLE AS $$
    WITH positions AS (
        SELECT g.consumer_group, g.queue_id, count(*) AS partitions, sum(g.lag)::bigint AS total_lag,
               count(*) FILTER (WHERE g.lag > 0) AS partitions_with_lag,
               min(CASE WHEN g.lag > 0 THEN queen.created_at_v1(g.partition_id, g.next_offset) END)
                    AS oldest_pending_at,
               max(g.active_at) AS active_at, sum(g.total_consumed)::bigint AS total_consumed
          FROM queen.group_positions_v1(p_tenant, p_group, p_queue) g
         GROUP BY g.consumer_group, g.queue_id
    ), leases AS (
        SELECT c.consumer_group, p.queue_id, count(DISTINCT c.worker_id) AS members
          FROM queen.log_consumers c JOIN queen.log_partitions p ON p.id = c.partition_id
         WHERE c.worker_id IS NOT NULL AND c.lease_expires_at > clock_timestamp()
         GROUP BY c.consumer_group, p.queue_id
    ), known AS (
        SELECT coalesce(s.consumer_group, x.consumer_group) AS consumer_group,
               coalesce(s.queue_name, q.name) AS queue_name, s.mode, s.point, s.subscribed_at, x.queue_id,
               x.partitions, x.total_lag, x.partitions_with_lag, x.oldest_pending_at, x.active_at,
               x.total_consumed
          FROM queen.subscriptions_v1(p_tenant, p_group, p_queue) s
          FULL JOIN positions x ON x.consumer_group = s.consumer_group AND x.queue_id = s.queue_id
          LEFT JOIN queen.queues q ON q.id = x.queue_id
    )
    SELECT k.consumer_group, k.queue_name, k.mode, nullif(k.point, '-infinity'), k.subscribed_at,
           coalesce(k.partitions, 0), coalesce(l.members, 0), coalesce(k.total_lag, 0),
           coalesce(k.partitions_with_lag, 0), k.oldest_pending_at, k.active_at,
           coalesce(k.total_consumed, 0)
      FROM known k
      LEFT JOIN leases l ON l.consumer_group = k.consumer_group AND l.queue_id = k.queue_id
     ORDER BY k.consumer_group, k.queue_name
$$;

-- The same for all groups and queues at once. What the planner can't know is that every group reads about
-- every partition of a queue: left alone it looks up a million cursors one by one.
CREATE OR REPLACE FUNCTION queen.list_all_groups_v1(p_tenant uuid)
RETURNS TABLE (consumer_group text, queue_name text, mode text, point timestamptz,
               subscribed_at timestamptz, partitions bigint, members bigint, total_lag bigint,
               partitions_with_lag bigint, oldest_pending_at timestamptz, active_at timestamptz,
               total_consumed bigint)
LANGUAGE sql STABLE SET jit = off SET enable_nestloop = off SET work_mem = '64MB' AS $$
    SELECT * FROM queen.list_groups_v1(p_tenant, NULL, NULL)
$$;

-- One row for each partition that a group reads, ordered by queue and partition.
CREATE OR REPLACE FUNCTION queen.group_partitions_v1(p_tenant uuid, p_group text, p_queue text)
RETURNS TABLE (queue_name text, partition_id uuid, partition_name text, next_offset bigint,
               last_offset bigint, lag bigint, oldest_pending_at timestamptz, has_cursor boolean,
               worker_id text, lease_expires_at timestamptz, batch_end bigint, deliveries integer,
               failures integer, total_consumed bigint, active_at timestamptz)
LANGUAGE sql STABLE AS $$
    SELECT q.name, g.partition_id, g.partition_name, g.next_offset, g.last_offset, g.lag,
           CASE WHEN g.lag > 0 THEN queen.created_at_v1(g.partition_id, g.next_offset) END, g.has_cursor,
           g.worker_id, g.lease_expires_at, g.batch_end, g.deliveries, g.failures, g.total_consumed,
           g.active_at
      FROM queen.group_positions_v1(p_tenant, p_group, p_queue) g
      JOIN queen.queues q ON q.id = g.queue_id
     ORDER BY q.name, g.partition_name
$$;

-- Move a group's subscription point: where cursors that don't exist yet will start. Returns the queues
-- ('' for a discovery subscription); no row when the group has no subscription.
CREATE OR REPLACE FUNCTION queen.resubscribe_v1(p_tenant uuid, p_group text, p_point timestamptz)
RETURNS SETOF text LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM queen.consumer_groups_metadata m
      WHERE m.tenant_id = p_tenant AND m.consumer_group = p_group
      ORDER BY m.queue_name, m.namespace, m.task FOR NO KEY UPDATE;
    RETURN QUERY
    UPDATE queen.consumer_groups_metadata m SET subscription_timestamp = p_point
     WHERE m.tenant_id = p_tenant AND m.consumer_group = p_group
 RETURNING m.queue_name;
    PERFORM queen.record_move_v1(p_tenant, m.queue_name) FROM queen.consumer_groups_metadata m
      WHERE m.tenant_id = p_tenant AND m.consumer_group = p_group AND m.queue_name <> '';
END $$;

-- Put a group's cursors in a queue, or in one partition of it: to the end, or to the first message created
-- at or after p_since (NULL: to the beginning). Leases end and retries start anew; partitions without a
-- cursor get one. Returns how many partitions moved, NULL when the queue, the partition or the group in that
-- queue is unknown. The partition locks hold pushes back meanwhile: the end is the end.
CREATE OR REPLACE FUNCTION queen.seek_v1(
    p_tenant uuid, p_group text, p_queue text, p_partition text, p_to_end boolean, p_since timestamptz)
RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_ids   uuid[];
    v_count bigint;
BEGIN
    SELECT coalesce(array_agg(l.id), '{}') INTO v_ids FROM (
        SELECT p.id FROM queen.queues q JOIN queen.log_partitions p ON p.queue_id = q.id
         WHERE q.tenant_id = p_tenant AND q.name = p_queue AND (p_partition IS NULL OR p.name = p_partition)
         ORDER BY p.id FOR NO KEY UPDATE OF p) l;
    IF (p_partition IS NOT NULL AND v_ids = '{}')
       OR NOT EXISTS (SELECT FROM queen.queues q WHERE q.tenant_id = p_tenant AND q.name = p_queue)
       OR NOT (EXISTS (SELECT FROM queen.subscriptions_v1(p_tenant, p_group, p_queue))
               OR EXISTS (SELECT FROM queen.log_consumers c JOIN queen.log_partitions p ON p.id = c.partition_id
                            JOIN queen.queues q ON q.id = p.queue_id
                           WHERE c.consumer_group = p_group AND q.tenant_id = p_tenant AND q.name = p_queue))
    THEN
        RETURN NULL;
    END IF;
    PERFORM FROM queen.log_consumers c
      WHERE c.partition_id = ANY (v_ids) AND c.consumer_group = p_group
      ORDER BY c.partition_id, c.consumer_group FOR NO KEY UPDATE;
    INSERT INTO queen.log_consumers AS c (partition_id, consumer_group, committed)
    SELECT p.id, p_group,
           CASE WHEN p_to_end THEN p.last_offset
                ELSE greatest(queen.first_offset_since_v1(p.id, coalesce(p_since, '-infinity')),
                              p.log_start) - 1 END
      FROM queen.log_partitions p WHERE p.id = ANY (v_ids)
     ORDER BY p.id
        ON CONFLICT (partition_id, consumer_group) DO UPDATE
       SET committed = excluded.committed, batch_end = NULL, worker_id = NULL, lease_expires_at = NULL,
           batch_retry_count = 0, attempt_offset = NULL, attempt_count = 0;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    PERFORM queen.record_move_v1(p_tenant, p_queue);
    RETURN v_count;
END $$;

-- Forget a group, in one queue or (p_queue NULL) everywhere: its cursors, and with p_metadata its
-- subscriptions (without, it starts again at its subscription point). A discovery subscription belongs to
-- no queue and goes only with the whole group. Returns the queues it was in. Dead letters stay.
--
-- The subscriptions are locked first: a pop that is just seeding a cursor from one holds a lock on it, so this
-- waits for that pop and then finds its cursor; pops that come later skip seeding.
CREATE OR REPLACE FUNCTION queen.delete_group_v1(
    p_tenant uuid, p_group text, p_queue text, p_metadata boolean,
    OUT cursors bigint, OUT subscriptions bigint, OUT queues text[])
LANGUAGE plpgsql AS $$
DECLARE
    v_ids    uuid[];
    v_queues uuid[];
BEGIN
    IF p_metadata THEN
        PERFORM FROM queen.consumer_groups_metadata m
          WHERE m.tenant_id = p_tenant AND m.consumer_group = p_group
            AND (p_queue IS NULL OR m.queue_name = p_queue)
          ORDER BY m.queue_name, m.namespace, m.task FOR UPDATE;
    END IF;
    SELECT coalesce(array_agg(s.queue_id) FILTER (WHERE s.queue_id IS NOT NULL), '{}'),
           coalesce(array_agg(s.queue_name), '{}') INTO v_queues, queues
      FROM (SELECT s.queue_id, s.queue_name FROM queen.subscriptions_v1(p_tenant, p_group, p_queue) s
            UNION
            SELECT q.id, q.name
              FROM queen.log_consumers c JOIN queen.log_partitions p ON p.id = c.partition_id
              JOIN queen.queues q ON q.id = p.queue_id
             WHERE c.consumer_group = p_group AND q.tenant_id = p_tenant
               AND (p_queue IS NULL OR q.name = p_queue)) s;
    subscriptions := 0;
    IF p_metadata THEN
        DELETE FROM queen.consumer_groups_metadata m
         WHERE m.tenant_id = p_tenant AND m.consumer_group = p_group
           AND (p_queue IS NULL OR m.queue_name = p_queue);
        GET DIAGNOSTICS subscriptions = ROW_COUNT;
    END IF;
    SELECT array_agg(l.id) INTO v_ids FROM (
        SELECT p.id FROM queen.log_partitions p WHERE p.queue_id = ANY (v_queues)
         ORDER BY p.id FOR NO KEY UPDATE) l;
    PERFORM FROM queen.log_consumers c
      WHERE c.partition_id = ANY (v_ids) AND c.consumer_group = p_group
      ORDER BY c.partition_id, c.consumer_group FOR UPDATE;
    DELETE FROM queen.log_consumers c WHERE c.partition_id = ANY (v_ids) AND c.consumer_group = p_group;
    GET DIAGNOSTICS cursors = ROW_COUNT;
    PERFORM queen.record_move_v1(p_tenant, moved) FROM unnest(queues) AS moved;
END $$;
