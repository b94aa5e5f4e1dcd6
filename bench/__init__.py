"""The project's benchmark: what push, drain and waiting cost here, beside PostgreSQL's own floor.

It starts a private PostgreSQL and a real broker, loads them from processes of its own and checks
that what it counted is what was stored and consumed. It must not import the broker's insides (only
`queen_trio.embedded`, for the PostgreSQL) nor stop what it didn't start.
Read next: workloads.py (what is measured), measure.py (how), docs/explanation/performance.md.
"""
