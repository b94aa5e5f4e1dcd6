"""The project's benchmark: push, drain and waiting here, beside other queues on the same work.

It starts servers of its own on loopback ports, loads them from processes of its own and checks that
what it counted is what was stored and consumed. It must not import the broker's insides (only
`queen_trio.embedded`, for PostgreSQL's programs) nor stop what it didn't start.
Read next: workloads.py (what is measured), measure.py (how), docs/explanation/performance.md.
"""
