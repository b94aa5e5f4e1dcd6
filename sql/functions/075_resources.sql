-- What each partition of a queue owes: to one group (group_positions_v1's rule), or, with p_group NULL, to
-- the group furthest behind in that partition. A group that is unknown in the queue, and a queue that
-- nobody reads, owe everything. processing is the leased part of it.
CREATE OR REPLACE FUNCTION queen.depth_v1(p_tenant uuid, p_queue text, p_group text)
RETURNS TABLE (partition_name text, pending bigint, processing bigint)
LANGUAGE sql STABLE AS $$
    SELECT p.name, coalesce(d.lag, p.last_offset - p.log_start + 1), coalesce(d.processing, 0)
      FROM queen.queues q
      JOIN queen.log_partitions p ON p.queue_id = q.id
      LEFT JOIN LATERAL (
            SELECT greatest(p.last_offset + 1 - greatest(c.committed + 1, p.log_start), 0) AS lag,
                   CASE WHEN c.lease_expires_at > clock_timestamp()
                        THEN greatest(c.batch_end - greatest(c.committed, p.log_start - 1), 0) END
                        AS processing
              FROM queen.log_consumers c
             WHERE c.partition_id = p.id
             ORDER BY c.committed LIMIT 1) d ON true
     WHERE p_group IS NULL AND q.tenant_id = p_tenant AND q.name = p_queue
    UNION ALL
    SELECT p.name, coalesce(g.lag, p.last_offset - p.log_start + 1),
           coalesce(CASE WHEN g.lease_expires_at > clock_timestamp()
                         THEN greatest(g.batch_end - g.next_offset + 1, 0) END, 0)
      FROM queen.queues q
      JOIN queen.log_partitions p ON p.queue_id = q.id
      LEFT JOIN queen.group_positions_v1(p_tenant, p_group, p_queue) g ON g.partition_id = p.id
     WHERE p_group IS NOT NULL AND q.tenant_id = p_tenant AND q.name = p_queue
     ORDER BY 1
$$;

-- Partitions over all queues (p_queue NULL) or of one, with their counts as in list_queues_v1.
CREATE OR REPLACE FUNCTION queen.find_partitions_v1(p_tenant uuid, p_queue text, p_limit bigint, p_offset bigint)
RETURNS TABLE (queue_name text, namespace text, task text, id uuid, name text, created_at timestamptz,
               last_offset bigint, log_start bigint, pending bigint, processing bigint,
               last_write_at timestamptz)
LANGUAGE sql STABLE AS $$
    SELECT f.queue_name, f.namespace, f.task, f.id, f.name, f.created_at, f.last_offset, f.log_start,
           greatest(f.last_offset - greatest(c.committed, f.log_start - 1), 0),
           coalesce(c.processing, 0)::bigint, nullif(f.last_created_at, '-infinity')
      FROM (SELECT q.name AS queue_name, q.namespace, q.task, p.*
              FROM queen.queues q JOIN queen.log_partitions p ON p.queue_id = q.id
             WHERE q.tenant_id = p_tenant AND (p_queue IS NULL OR q.name = p_queue)
             ORDER BY q.name, p.name LIMIT p_limit OFFSET p_offset) f
      LEFT JOIN LATERAL (
            SELECT min(c.committed) AS committed,
                   sum(greatest(c.batch_end - greatest(c.committed, f.log_start - 1), 0))
                     FILTER (WHERE c.lease_expires_at > clock_timestamp()) AS processing
              FROM queen.log_consumers c WHERE c.partition_id = f.id) c ON true
     ORDER BY f.queue_name, f.name
$$;

-- Remove the messages of the next p_most partitions of a queue above p_after (by id), or of one partition:
-- segments go, cursors move to the end, leases end. Hashes stay: the dedup window knows them still, and
-- retention purges them. Returns the last partition done, NULL when there was none left.
CREATE OR REPLACE FUNCTION queen.clear_v1(
    p_tenant uuid, p_queue text, p_partition text, p_after uuid, p_most bigint,
    OUT done_until uuid, OUT cleared bigint)
LANGUAGE plpgsql AS $$
DECLARE
    v_ids uuid[];
BEGIN
    SELECT array_agg(l.id), max(l.id::text)::uuid INTO v_ids, done_until FROM (
        SELECT p.id FROM queen.queues q JOIN queen.log_partitions p ON p.queue_id = q.id
         WHERE q.tenant_id = p_tenant AND q.name = p_queue
           AND (p_partition IS NULL OR p.name = p_partition) AND (p_after IS NULL OR p.id > p_after)
         ORDER BY p.id LIMIT p_most FOR NO KEY UPDATE OF p) l;
    PERFORM FROM queen.log_consumers c WHERE c.partition_id = ANY (v_ids)
      ORDER BY c.partition_id, c.consumer_group FOR NO KEY UPDATE;
    SELECT coalesce(sum(p.last_offset + 1 - p.log_start), 0) INTO cleared
      FROM queen.log_partitions p WHERE p.id = ANY (v_ids);
    DELETE FROM queen.log_segments s WHERE s.partition_id = ANY (v_ids);
    UPDATE queen.log_partitions p SET log_start = p.last_offset + 1, oldest_live_at = NULL
     WHERE p.id = ANY (v_ids) AND (p.log_start <= p.last_offset OR p.oldest_live_at IS NOT NULL);
    UPDATE queen.log_consumers c
       SET committed = p.last_offset, batch_end = NULL, worker_id = NULL, lease_expires_at = NULL,
           batch_retry_count = 0, attempt_offset = NULL, attempt_count = 0
      FROM queen.log_partitions p
     WHERE p.id = c.partition_id AND c.partition_id = ANY (v_ids)
       AND (c.committed <> p.last_offset OR c.batch_end IS NOT NULL OR c.attempt_count > 0);
END $$;

-- Counts that no listing of queues gives.
CREATE OR REPLACE FUNCTION queen.overview_v1(p_tenant uuid)
RETURNS TABLE (consumer_groups bigint, dead_letters bigint, database_bytes bigint)
LANGUAGE sql STABLE AS $$
    SELECT (SELECT count(*) FROM (
                -- A group per step of the index, however many cursors it has.
                WITH RECURSIVE step AS (
                    (SELECT c.consumer_group FROM queen.log_consumers c ORDER BY 1 LIMIT 1)
                    UNION ALL
                    SELECT (SELECT c.consumer_group FROM queen.log_consumers c
                             WHERE c.consumer_group > s.consumer_group ORDER BY 1 LIMIT 1)
                      FROM step s WHERE s.consumer_group IS NOT NULL)
                SELECT s.consumer_group FROM step s WHERE s.consumer_group IS NOT NULL
                UNION
                SELECT m.consumer_group FROM queen.consumer_groups_metadata m WHERE m.tenant_id = p_tenant) g),
           (SELECT count(*) FROM queen.log_dlq d WHERE d.tenant_id = p_tenant),
           pg_database_size(current_database())
$$;

CREATE OR REPLACE FUNCTION queen.dead_letters_by_queue_v1(p_tenant uuid, p_queue text)
RETURNS TABLE (queue_name text, dead_letters bigint) LANGUAGE sql STABLE AS $$
    SELECT d.queue_name, count(*) FROM queen.log_dlq d
     WHERE d.tenant_id = p_tenant AND (p_queue IS NULL OR d.queue_name = p_queue)
     GROUP BY d.queue_name
$$;

-- Add what a broker counted since its last flush to the current minute. p_counters holds columns of
-- queen.worker_metrics: the counts are added, the gauges replace those before. A column that this broker
-- doesn't know yet counts 0. The arrays are aligned.
CREATE OR REPLACE FUNCTION queen.record_traffic_v1(
    p_tenant uuid, p_server text, p_counters jsonb, p_queues text[], p_pushed bigint[], p_popped bigint[])
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_bucket timestamptz := date_trunc('minute', clock_timestamp());
    v_zero   jsonb := (SELECT jsonb_object_agg(a.attname, 0) FROM pg_attribute a
                        WHERE a.attrelid = 'queen.worker_metrics'::regclass AND a.attnum > 2
                          AND NOT a.attisdropped);
BEGIN
    INSERT INTO queen.worker_metrics AS w
    SELECT r.* FROM jsonb_populate_record(NULL::queen.worker_metrics, v_zero || p_counters
                || jsonb_build_object('bucket_at', v_bucket, 'server_id', p_server)) r
        ON CONFLICT (bucket_at, server_id) DO UPDATE
       SET push_calls = w.push_calls + excluded.push_calls, pushed = w.pushed + excluded.pushed,
           pop_calls = w.pop_calls + excluded.pop_calls, empty_pops = w.empty_pops + excluded.empty_pops,
           popped = w.popped + excluded.popped, ack_calls = w.ack_calls + excluded.ack_calls,
           completed = w.completed + excluded.completed, failed = w.failed + excluded.failed,
           dead_lettered = w.dead_lettered + excluded.dead_lettered,
           database_errors = w.database_errors + excluded.database_errors,
           cpu_ms = w.cpu_ms + excluded.cpu_ms, rss_bytes = excluded.rss_bytes,
           parked_pops = excluded.parked_pops, pool_open = excluded.pool_open,
           pool_in_use = excluded.pool_in_use, pool_waiting = excluded.pool_waiting;
    INSERT INTO queen.stats AS s (tenant_id, bucket_at, queue_name, pushed, popped)
    SELECT p_tenant, v_bucket, u.queue, u.pushed, u.popped
      FROM unnest(p_queues, p_pushed, p_popped) AS u(queue, pushed, popped)
     ORDER BY u.queue    -- brokers that flush at once lock the rows in one order
        ON CONFLICT (tenant_id, bucket_at, queue_name) DO UPDATE
       SET pushed = s.pushed + excluded.pushed, popped = s.popped + excluded.popped;
END $$;

-- Sample what every group owes now into the current minute; returns how many (queue, group) pairs there are.
CREATE OR REPLACE FUNCTION queen.record_lag_v1(p_tenant uuid)
RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_now   timestamptz := clock_timestamp();
    v_count bigint;
BEGIN
    INSERT INTO queen.queue_lag_metrics
           (tenant_id, bucket_at, queue_name, consumer_group, lag, time_lag_seconds)
    SELECT p_tenant, date_trunc('minute', v_now), g.queue_name, g.consumer_group, g.total_lag,
           coalesce(greatest(extract(epoch FROM v_now - g.oldest_pending_at), 0), 0)
      FROM queen.list_all_groups_v1(p_tenant) g
     WHERE g.queue_name <> ''
     ORDER BY g.queue_name, g.consumer_group
        ON CONFLICT (tenant_id, bucket_at, queue_name, consumer_group) DO UPDATE
       SET lag = excluded.lag, time_lag_seconds = excluded.time_lag_seconds;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END $$;

-- Delete samples older than p_before, p_most rows of each table at most; returns whether more are left.
CREATE OR REPLACE FUNCTION queen.purge_stats_v1(p_before timestamptz, p_most bigint)
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_count bigint;
    v_more  boolean := false;
    v_table text;
BEGIN
    FOREACH v_table IN ARRAY ARRAY['worker_metrics', 'stats', 'queue_lag_metrics'] LOOP
        EXECUTE format('DELETE FROM queen.%I WHERE ctid = ANY (ARRAY(SELECT t.ctid FROM queen.%I t
                         WHERE t.bucket_at < $1 LIMIT $2))', v_table, v_table) USING p_before, p_most;
        GET DIAGNOSTICS v_count = ROW_COUNT;
        v_more := v_more OR v_count = p_most;
    END LOOP;
    RETURN v_more;
END $$;

-- Time series between p_from and p_to in steps of p_step_seconds, each row a step that has data.
CREATE OR REPLACE FUNCTION queen.queue_traffic_v1(
    p_tenant uuid, p_queue text, p_namespace text, p_task text, p_from timestamptz, p_to timestamptz,
    p_step_seconds bigint)
RETURNS TABLE (at timestamptz, pushed bigint, popped bigint) LANGUAGE sql STABLE AS $$
    SELECT date_bin(make_interval(secs => p_step_seconds), s.bucket_at, '2000-01-01Z') AS at,
           sum(s.pushed)::bigint, sum(s.popped)::bigint
      FROM queen.stats s
      LEFT JOIN queen.queues q ON q.tenant_id = s.tenant_id AND q.name = s.queue_name
     WHERE s.tenant_id = p_tenant AND s.bucket_at >= p_from AND s.bucket_at <= p_to
       AND (p_queue IS NULL OR s.queue_name = p_queue)
       AND (p_namespace IS NULL OR q.namespace = p_namespace) AND (p_task IS NULL OR q.task = p_task)
     GROUP BY 1 ORDER BY 1
$$;

CREATE OR REPLACE FUNCTION queen.lag_history_v1(
    p_tenant uuid, p_queue text, p_from timestamptz, p_to timestamptz, p_step_seconds bigint)
RETURNS TABLE (at timestamptz, queue_name text, consumer_group text, lag bigint, time_lag_seconds double precision)
LANGUAGE sql STABLE AS $$
    SELECT date_bin(make_interval(secs => p_step_seconds), l.bucket_at, '2000-01-01Z') AS at,
           l.queue_name, l.consumer_group, max(l.lag), max(l.time_lag_seconds)
      FROM queen.queue_lag_metrics l
     WHERE l.tenant_id = p_tenant AND l.bucket_at >= p_from AND l.bucket_at <= p_to
       AND (p_queue IS NULL OR l.queue_name = p_queue)
     GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
$$;

CREATE OR REPLACE FUNCTION queen.worker_history_v1(
    p_server text, p_from timestamptz, p_to timestamptz, p_step_seconds bigint)
RETURNS TABLE (at timestamptz, server_id text, push_calls bigint, pushed bigint, pop_calls bigint,
               empty_pops bigint, popped bigint, ack_calls bigint, completed bigint, failed bigint,
               dead_lettered bigint, database_errors bigint, cpu_ms bigint, rss_bytes bigint,
               parked_pops bigint, pool_open bigint, pool_in_use bigint, pool_waiting bigint)
LANGUAGE sql STABLE AS $$
    SELECT date_bin(make_interval(secs => p_step_seconds), w.bucket_at, '2000-01-01Z') AS at, w.server_id,
           sum(w.push_calls)::bigint, sum(w.pushed)::bigint, sum(w.pop_calls)::bigint,
           sum(w.empty_pops)::bigint, sum(w.popped)::bigint, sum(w.ack_calls)::bigint,
           sum(w.completed)::bigint, sum(w.failed)::bigint, sum(w.dead_lettered)::bigint,
           sum(w.database_errors)::bigint, sum(w.cpu_ms)::bigint, max(w.rss_bytes), max(w.parked_pops),
           max(w.pool_open), max(w.pool_in_use), max(w.pool_waiting)
      FROM queen.worker_metrics w
     WHERE w.bucket_at >= p_from AND w.bucket_at <= p_to AND (p_server IS NULL OR w.server_id = p_server)
     GROUP BY 1, 2 ORDER BY 1, 2
$$;

-- How PostgreSQL does, as one JSON object; only what any role may read.
CREATE OR REPLACE FUNCTION queen.postgres_stats_v1()
RETURNS jsonb LANGUAGE sql STABLE AS $$
    SELECT jsonb_build_object(
        'version', current_setting('server_version'),
        'databaseBytes', pg_database_size(d.datname),
        'connections', d.numbackends,
        'maxConnections', current_setting('max_connections')::integer,
        'commits', d.xact_commit, 'rollbacks', d.xact_rollback, 'deadlocks', d.deadlocks,
        'blocksRead', d.blks_read, 'blocksHit', d.blks_hit,
        'cacheHitRatio', round(d.blks_hit::numeric / nullif(d.blks_hit + d.blks_read, 0), 4),
        'temporaryBytes', d.temp_bytes,
        'statsSince', d.stats_reset,
        'tables', (SELECT coalesce(jsonb_agg(jsonb_build_object(
                'name', t.relname, 'bytes', pg_total_relation_size(t.relid), 'liveRows', t.n_live_tup,
                'deadRows', t.n_dead_tup, 'inserts', t.n_tup_ins, 'updates', t.n_tup_upd,
                'hotUpdates', t.n_tup_hot_upd, 'deletes', t.n_tup_del, 'sequentialScans', t.seq_scan,
                'indexScans', t.idx_scan, 'lastAutovacuum', t.last_autovacuum,
                'lastAutoanalyze', t.last_autoanalyze) ORDER BY t.relname), '[]')
              FROM pg_stat_user_tables t WHERE t.schemaname = 'queen'))
      FROM pg_stat_database d WHERE d.datname = current_database()
$$;
