"""The disk spool: pushes that PostgreSQL couldn't take, safe on this broker's disk until it can.

Append-only files of checksummed records, a lock on their directory, and the loop that replays them.
It must not know SQL, PostgreSQL or how a push is committed: whoever opens it hands that in.
Read next: records.py (the format), directory.py (the files), quarantine.py (what is set aside),
writer.py (one fsync for many pushes), drain.py (the replay).
"""

from queen_trio.spool.directory import SpoolInUse, SpoolStatistics
from queen_trio.spool.drain import Drain
from queen_trio.spool.records import SpoolRecord
from queen_trio.spool.writer import Spool, open_spool

__all__ = [
    "Drain",
    "Spool",
    "SpoolInUse",
    "SpoolRecord",
    "SpoolStatistics",
    "open_spool",
]
