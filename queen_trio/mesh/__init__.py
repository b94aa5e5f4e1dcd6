"""The mesh: best-effort hints between brokers over TCP (seeds, "What the mesh is"; spec 3).

It must never carry a message, a cursor or a decision, block a caller, or be needed for correctness:
with it cut the same things happen, only later. The wire itself is `queen_protocol`, sans-I/O.
Read next: node.py (all of it together), dialer.py and listener.py (the two ends of a link).
"""

from queen_trio.mesh.node import MeshNode

__all__ = ["MeshNode"]
