"""A broker reduced to its private PostgreSQL, for the tests to kill.

broker.py DATA_DIR [BINARIES [UID]]: prints "HOST PID" once ready, and runs until SIGTERM. With UID
it becomes that user first, after its imports, as the interpreter may be out of that user's reach.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import structlog
import trio

from queen_trio.embedded import EmbeddedError, open_embedded


async def main(data_dir: Path, binaries: Path | None) -> None:
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async with open_embedded(data_dir, binaries=binaries) as embedded:
            print(embedded.host, embedded.pid, flush=True)
            async for _ in signals:
                break


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    if len(sys.argv) > 3:
        os.setgroups([])
        os.setgid(int(sys.argv[3]))
        os.setuid(int(sys.argv[3]))
    try:
        trio.run(main, Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
    except EmbeddedError as error:
        sys.exit(f"EmbeddedError: {error}")
