"""Values and rules without I/O: what a message, a pop, an acknowledgement is.

Nothing here may wait, read a clock or a random source that wasn't handed in, or know PostgreSQL
or HTTP. The rules come from spec 2; the use-cases that apply them are in `queen_trio.broker`.
"""
