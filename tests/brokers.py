"""Real broker processes for tests: start one, read its log, stop or kill it by its pid."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from queen_trio.store.settings import ConnectionSettings

START_SECONDS = 30.0
STOP_SECONDS = 20.0


class LiveBroker:
    """One `queen-trio serve` process on a free port of 127.0.0.1."""

    command: Sequence[str] = (sys.executable, "-m", "queen_trio", "serve")

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("PG", "QUEEN_"))},
            "PORT": "0",
            "QUEEN_BIND_ADDR": "127.0.0.1",
            "QUEEN_LOG_JSON": "true",
            **environment,
        }
        self.events: list[dict[str, Any]] = []
        self.stderr: list[str] = []
        self.port = 0

    def start(self) -> None:
        """Start the process and wait until it serves; raises with its log if it ends before."""
        self.launch()
        self.wait_serving()

    def wait_serving(self) -> None:
        """Wait until a launched process serves; raises with its log if it ends before."""
        listening = self.wait_event("listening", START_SECONDS)
        self.port = int(listening["port"])
        # A broker that is started again keeps its address.
        self._environment["PORT"] = str(self.port)

    def launch(self) -> None:
        """Start the process, whatever becomes of it."""
        self.process = subprocess.Popen(
            self.command,
            env=self._environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_event(self, event: str, seconds: float = 10.0) -> dict[str, Any]:
        """Wait for a log event of the process that runs now, and return its first line."""
        until = time.monotonic() + seconds
        with self._changed:
            while True:
                for line in self.events:
                    if line["event"] == event:
                        return line
                left = until - time.monotonic()
                if left <= 0 or (self.process.poll() is not None and not self._reader.is_alive()):
                    raise AssertionError(f"no {event!r} in:\n" + "".join(self.stderr))
                self._changed.wait(min(left, 0.1))

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """SIGKILL: no goodbye to anyone."""
        self.process.kill()
        self.wait()

    def end(self) -> None:
        """Kill it unless it has ended."""
        if self.process.poll() is None:
            self.kill()

    def wait(self, seconds: float = STOP_SECONDS) -> int:
        """Wait for the process to end and return its exit code."""
        code = self.process.wait(seconds)
        self._reader.join(seconds)
        return code

    def restart(self) -> None:
        """Start again after `stop` or `kill`, on the same port, with an empty log."""
        self.events.clear()
        self.stderr.clear()
        self.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.stderr.append(line)
                if line.startswith("{"):
                    self.events.append(json.loads(line))
                self._changed.notify_all()
        self.process.stderr.close()


def postgres_environment(settings: ConnectionSettings) -> dict[str, str]:
    """The PG_* variables that lead a broker to this database."""
    return {
        "PG_HOST": settings.host,
        "PG_PORT": str(settings.port),
        "PG_USER": settings.user,
        "PG_DATABASE": settings.database,
        "DB_POOL_SIZE": "10",
    }


@contextmanager
def running_broker(
    environment: Mapping[str, str], command: Sequence[str] = LiveBroker.command
) -> Iterator[LiveBroker]:
    """Run a broker for the block's time; `command` is one that serves under other conditions."""
    with tempfile.TemporaryDirectory(prefix="queen-spool-") as spool:
        broker = LiveBroker({"FILE_BUFFER_DIR": spool, **environment})
        broker.command = command
        broker.start()
        try:
            yield broker
        finally:
            broker.end()
