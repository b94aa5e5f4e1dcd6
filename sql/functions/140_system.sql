-- The switches that every broker follows: keys of queen.system_state whose value is a JSON boolean.
CREATE OR REPLACE FUNCTION queen.switches_v1() RETURNS TABLE (key text, enabled boolean)
LANGUAGE sql STABLE AS $$
    SELECT s.key, s.value = 'true'::jsonb FROM queen.system_state s
     WHERE s.key IN ('maintenance', 'pop_maintenance')
$$;

CREATE OR REPLACE FUNCTION queen.set_switch_v1(p_key text, p_enabled boolean)
RETURNS void LANGUAGE sql AS $$
    INSERT INTO queen.system_state (key, value) VALUES (p_key, to_jsonb(p_enabled))
        ON CONFLICT (key) DO UPDATE SET value = excluded.value, updated_at = clock_timestamp()
$$;
