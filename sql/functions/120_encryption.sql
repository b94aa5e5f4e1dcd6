-- Those of the named queues that want their payloads encrypted.
CREATE OR REPLACE FUNCTION queen.encrypted_queues_v1(p_tenant uuid, p_names text[])
RETURNS TABLE (name text) LANGUAGE sql STABLE AS $$
    SELECT q.name FROM queen.queues q
     WHERE q.tenant_id = p_tenant AND q.name = ANY (p_names) AND q.encryption_enabled
$$;
