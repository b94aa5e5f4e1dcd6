"""The background jobs: retention, statistics, metrics, reconcile, spool drain (spec 4).

A job must not be needed for delivery: all of them may be dead for an hour and no message is late.
It never talks to http or mesh. Those that only one replica should do hold an advisory lock for a
cycle. Read next: runner.py, the one loop that runs them all.
"""
