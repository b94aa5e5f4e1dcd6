"""The use-cases: push, pop, ack, queues, and what they share (lanes, wakeups, outages).

Nothing here knows HTTP, SQL text or psycopg. Every delivery rule is PostgreSQL's to decide: these
modules group requests, wait, and read what came back. A broker keeps no state it couldn't lose.
Read next: push.py for how requests share commits, wakeups.py for how a pop waits.
"""

from queen_trio.broker.broker import Broker, open_broker

__all__ = ["Broker", "open_broker"]
