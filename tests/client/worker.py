"""A program as a user of the client writes it: run by test_program.py, on asyncio's own loop.

Arguments: the broker's URL, a queue to consume from and one to push to, through a buffer that
nothing but the client's own shutdown flushes.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from queen import Queen


async def main(url: str, source: str, sink: str) -> None:
    """Move messages until a signal ends the program, which is the client's business."""
    queen = Queen(url)

    async def handler(message: dict[str, Any]) -> None:
        buffer = {"message_count": 1000, "time_millis": 600_000}
        await queen.queue(sink).buffer(buffer).push({"data": message["data"] * 2})
        print("handled", flush=True)

    consumer = asyncio.create_task(_consume(queen.queue(source).batch(1), handler))
    # The client's signal handler only schedules its shutdown: something must turn the loop.
    while not consumer.done():
        await asyncio.sleep(0.02)
    await consumer


async def _consume(builder: Any, handler: Any) -> None:
    await builder.consume(handler)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
