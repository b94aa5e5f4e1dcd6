"""What the load works on: groups, queues, partitions."""

from __future__ import annotations

from tests.chaos.history import Place

QUEUE_MODE = "__QUEUE_MODE__"
GROUPS = (QUEUE_MODE, "alpha", "beta")
QUEUES = ("orders", "mails")
# Without deduplication: what is pushed there is pushed once, whatever becomes of it.
ONCE = "logs"
PARTITIONS = ("p0", "p1", "p2")
PLACES = [Place(queue, partition) for queue in (*QUEUES, ONCE) for partition in PARTITIONS]
