-- Create or change a queue. p_options holds columns of queen.queues by name; null means that column's
-- default. p_replace sets every option that is absent to its default, instead of keeping it. On create,
-- leaseTime defaults to 300 (60 is for a queue that a push made).
CREATE OR REPLACE FUNCTION queen.configure_v1(
    p_tenant uuid, p_name text, p_namespace text, p_task text, p_options jsonb, p_replace boolean)
RETURNS SETOF queen.queues LANGUAGE plpgsql AS $$
DECLARE
    v_old      queen.queues;
    v_new      queen.queues;
    v_defaults jsonb;
BEGIN
    LOOP    -- again, when somebody else creates or deletes it meanwhile
        SELECT * INTO v_old FROM queen.queues q
         WHERE q.tenant_id = p_tenant AND q.name = p_name FOR NO KEY UPDATE;
        EXIT WHEN FOUND;
        INSERT INTO queen.queues (tenant_id, name, namespace, task, lease_time)
        VALUES (p_tenant, p_name, queen.namespace_of_v1(p_name), queen.task_of_v1(p_name), 300)
            ON CONFLICT (tenant_id, name) DO NOTHING;
    END LOOP;

    v_defaults := jsonb_build_object(
        'lease_time', 300, 'retry_limit', 3, 'dead_letter_queue', true, 'dlq_after_max_retries', true,
        'delayed_processing', 0, 'window_buffer', 0, 'min_pop_wait_time', 0, 'retention_enabled', false,
        'retention_seconds', 0, 'completed_retention_seconds', 0, 'max_wait_time_seconds', 0,
        'encryption_enabled', false, 'dedup_window_seconds', 3600, 'priority', 0, 'ttl', 0, 'max_size', 0,
        'retry_delay', 0);
    v_new := jsonb_populate_record(v_old,
        CASE WHEN p_replace THEN v_defaults ELSE '{}' END
        || (SELECT coalesce(jsonb_object_agg(o.key, CASE WHEN o.value = 'null' THEN v_defaults->o.key
                                                         ELSE o.value END), '{}')
              FROM jsonb_each(p_options) o));
    UPDATE queen.queues q
       SET namespace = coalesce(p_namespace, q.namespace), task = coalesce(p_task, q.task),
           lease_time = v_new.lease_time, retry_limit = v_new.retry_limit,
           dead_letter_queue = v_new.dead_letter_queue, dlq_after_max_retries = v_new.dlq_after_max_retries,
           delayed_processing = v_new.delayed_processing, window_buffer = v_new.window_buffer,
           min_pop_wait_time = v_new.min_pop_wait_time, retention_enabled = v_new.retention_enabled,
           retention_seconds = v_new.retention_seconds,
           completed_retention_seconds = v_new.completed_retention_seconds,
           max_wait_time_seconds = v_new.max_wait_time_seconds, encryption_enabled = v_new.encryption_enabled,
           dedup_window_seconds = v_new.dedup_window_seconds, priority = v_new.priority, ttl = v_new.ttl,
           max_size = v_new.max_size, retry_delay = v_new.retry_delay
     WHERE q.id = v_old.id;
    RETURN QUERY SELECT * FROM queen.queues q WHERE q.id = v_old.id;
END $$;

-- Delete a queue with everything that hangs on it, its groups' subscriptions and dead letters included.
-- Locks all its partitions in ascending order first, so that it waits for pushes instead of deadlocking.
CREATE OR REPLACE FUNCTION queen.delete_queue_v1(p_tenant uuid, p_name text)
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_id  uuid;
    v_ids uuid[];
BEGIN
    SELECT q.id INTO v_id FROM queen.queues q
     WHERE q.tenant_id = p_tenant AND q.name = p_name FOR UPDATE;
    DELETE FROM queen.consumer_groups_metadata m WHERE m.tenant_id = p_tenant AND m.queue_name = p_name;
    IF v_id IS NULL THEN
        RETURN false;
    END IF;
    SELECT array_agg(l.id) INTO v_ids FROM (
        SELECT p.id FROM queen.log_partitions p WHERE p.queue_id = v_id ORDER BY p.id FOR UPDATE) l;
    PERFORM FROM queen.log_consumers c WHERE c.partition_id = ANY (v_ids)
      ORDER BY c.partition_id, c.consumer_group FOR UPDATE;
    DELETE FROM queen.log_txns t WHERE t.partition_id = ANY (v_ids);
    -- By name: dead letters outlive partitions. Locked in their order first (080_dlq).
    PERFORM FROM queen.log_dlq d WHERE d.tenant_id = p_tenant AND d.queue_name = p_name
      ORDER BY d.failed_at, d.id FOR UPDATE;
    DELETE FROM queen.log_dlq d WHERE d.tenant_id = p_tenant AND d.queue_name = p_name;
    DELETE FROM queen.queues q WHERE q.id = v_id;
    RETURN true;
END $$;

-- Queues with their counts. pending is what the group furthest behind has not committed (all of it when
-- no group has a cursor), processing what is leased now; both by offset arithmetic, no scan of messages.
CREATE OR REPLACE FUNCTION queen.list_queues_v1(p_tenant uuid, p_name text)
RETURNS TABLE (id uuid, name text, namespace text, task text, created_at timestamptz,
               partitions bigint, total bigint, pending bigint, processing bigint)
LANGUAGE sql STABLE AS $$
    SELECT q.id, q.name, q.namespace, q.task, q.created_at, count(p.id),
           coalesce(sum(p.last_offset - p.log_start + 1), 0)::bigint,
           coalesce(sum(greatest(p.last_offset - greatest(c.committed, p.log_start - 1), 0)), 0)::bigint,
           coalesce(sum(c.processing), 0)::bigint
      FROM queen.queues q
      LEFT JOIN queen.log_partitions p ON p.queue_id = q.id
      LEFT JOIN LATERAL (
            SELECT min(c.committed) AS committed,
                   sum(greatest(c.batch_end - greatest(c.committed, p.log_start - 1), 0))
                   FILTER (WHERE c.lease_expires_at > clock_timestamp()) AS processing
              FROM queen.log_consumers c WHERE c.partition_id = p.id) c ON true
     WHERE q.tenant_id = p_tenant AND (p_name IS NULL OR q.name = p_name)
     GROUP BY q.id
     ORDER BY q.name
$$;

CREATE OR REPLACE FUNCTION queen.list_partitions_v1(p_tenant uuid, p_queue text)
RETURNS TABLE (id uuid, name text, created_at timestamptz, last_offset bigint, log_start bigint,
               total bigint, pending bigint, processing bigint, last_write_at timestamptz)
LANGUAGE sql STABLE AS $$
    SELECT p.id, p.name, p.created_at, p.last_offset, p.log_start, p.last_offset - p.log_start + 1,
           greatest(p.last_offset - greatest(c.committed, p.log_start - 1), 0),
           coalesce(c.processing, 0)::bigint, nullif(p.last_created_at, '-infinity')
      FROM queen.queues q
      JOIN queen.log_partitions p ON p.queue_id = q.id
      LEFT JOIN LATERAL (
            SELECT min(c.committed) AS committed,
                   sum(greatest(c.batch_end - greatest(c.committed, p.log_start - 1), 0))
                   FILTER (WHERE c.lease_expires_at > clock_timestamp()) AS processing
              FROM queen.log_consumers c WHERE c.partition_id = p.id) c ON true
     WHERE q.tenant_id = p_tenant AND q.name = p_queue
     ORDER BY p.name
$$;
