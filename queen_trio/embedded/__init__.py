"""The private PostgreSQL: a real server that runs while the broker does, on a Unix socket.

It finds binaries, makes the cluster, starts, watches and stops the server, and survives kill -9.
It must not know SQL, the schema or the pool (that is `queen_trio.store`), nor read the environment.
Read next: lifetime.py (the context), server.py (its course), supervisor.py (how no orphan stays).
"""

from queen_trio.embedded.account import default_data_dir
from queen_trio.embedded.binaries import Binaries, Source, find_binaries
from queen_trio.embedded.errors import EmbeddedError
from queen_trio.embedded.lifetime import open_embedded
from queen_trio.embedded.server import Embedded

__all__ = [
    "Binaries",
    "Embedded",
    "EmbeddedError",
    "Source",
    "default_data_dir",
    "find_binaries",
    "open_embedded",
]
