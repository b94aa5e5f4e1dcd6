-- What metrics say about the backlog: the newest sample of lag, the p_most largest of its pairs.
-- A sample is written in one statement (075_resources.sql): the newest minute is complete. age_ms is
-- that minute's, pairs counts all of them.
CREATE OR REPLACE FUNCTION queen.latest_lag_v1(p_tenant uuid, p_most bigint)
RETURNS TABLE (queue_name text, consumer_group text, lag bigint, time_lag_seconds double precision,
               age_ms bigint, pairs bigint)
LANGUAGE sql STABLE AS $$
    SELECT m.queue_name, m.consumer_group, m.lag, m.time_lag_seconds,
           (extract(epoch FROM clock_timestamp() - m.bucket_at) * 1000)::bigint, count(*) OVER ()
      FROM queen.queue_lag_metrics m
     WHERE m.tenant_id = p_tenant
       AND m.bucket_at = (SELECT max(n.bucket_at) FROM queen.queue_lag_metrics n
                           WHERE n.tenant_id = p_tenant)
     ORDER BY m.lag DESC, m.queue_name, m.consumer_group
     LIMIT p_most
$$;

-- Dead letters by queue, the p_most queues that have most; queues counts all that have any.
CREATE OR REPLACE FUNCTION queen.most_dead_letters_v1(p_tenant uuid, p_most bigint)
RETURNS TABLE (queue_name text, dead_letters bigint, queues bigint) LANGUAGE sql STABLE AS $$
    SELECT d.queue_name, count(*), count(*) OVER ()
      FROM queen.log_dlq d
     WHERE d.tenant_id = p_tenant
     GROUP BY d.queue_name
     ORDER BY count(*) DESC, d.queue_name
     LIMIT p_most
$$;
