"""`serve --workers N`: N broker processes on one host under a supervisor (spec 8.27).

The supervisor binds the port, brings PostgreSQL and the schema, starts workers and starts them
again. It must not serve a request, nor fork without exec; a worker must not outlive it.
Read next: supervisor.py (the host), process.py (one worker, seen from outside), worker.py (what a
worker knows of its place), siblings.py (how workers ask each other), config/workers.py (shares).
"""
