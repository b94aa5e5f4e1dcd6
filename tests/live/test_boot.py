"""How a broker starts, or says why it doesn't: exit codes, and one FATAL line per fault."""

from __future__ import annotations

import signal
import socket
import tempfile
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.brokers import LiveBroker, postgres_environment
from tests.http.api import data, open_api

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from queen_trio.store.settings import ConnectionSettings
    from tests.cluster import Cluster

PROMPT_SECONDS = 3.0


@contextmanager
def launched(environment: Mapping[str, str]) -> Iterator[LiveBroker]:
    """A broker that isn't expected to serve, or not yet."""
    with tempfile.TemporaryDirectory(prefix="queen-spool-") as spool:
        broker = LiveBroker({"FILE_BUFFER_DIR": spool, **environment})
        broker.launch()
        try:
            yield broker
        finally:
            broker.end()


def fatal_lines(broker: LiveBroker) -> list[str]:
    return [line for line in broker.stderr if "FATAL" in line]


def test_a_taken_port(settings: ConnectionSettings) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with launched({**postgres_environment(settings), "PORT": str(port)}) as broker:
            assert broker.wait() == 1
            [line] = fatal_lines(broker)
            assert f"can't listen on 127.0.0.1:{port}: Address already in use" in line
            assert "Traceback" not in "".join(broker.stderr)


def test_a_configuration_at_fault(settings: ConnectionSettings) -> None:
    faults = {"DB_POOL_SIZE": "many", "QUEEN_SHUTDOWN_TIMEOUT_MS": "-1"}
    with launched(postgres_environment(settings) | faults) as broker:
        assert broker.wait() == 2
        lines = fatal_lines(broker)
        assert len(lines) == 2
        assert all(any(name in line for line in lines) for name in faults)


def test_sigterm_while_postgres_is_away() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with socket.socket() as nobody:  # bound and not listening: refused
            nobody.bind(("127.0.0.1", 0))
            environment = {"PG_HOST": "127.0.0.1", "PG_PORT": str(nobody.getsockname()[1])}
            with launched(environment) as broker:
                broker.wait_event("postgres not reachable yet")
                started = time.monotonic()
                broker.process.send_signal(number)
                assert broker.wait() == 0
                assert time.monotonic() - started < PROMPT_SECONDS


def test_sigterm_while_postgres_says_nothing() -> None:
    """Connected, and then silence: the start-up packet gets no answer."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        environment = {"PG_HOST": "127.0.0.1", "PG_PORT": str(mute.getsockname()[1])}
        with launched(environment) as broker:
            mute.settimeout(10)
            connection, _ = mute.accept()
            started = time.monotonic()
            broker.process.send_signal(signal.SIGTERM)
            assert broker.wait() == 0
            assert time.monotonic() - started < PROMPT_SECONDS
            connection.close()


async def test_a_broker_waits_for_postgres(own_cluster: Cluster) -> None:
    own_cluster.stop()
    with launched(postgres_environment(own_cluster.settings("postgres"))) as broker:
        broker.wait_event("postgres not reachable yet")
        own_cluster.start()
        broker.port = int(broker.wait_event("listening", 20)["port"])
        async with open_api(broker) as api:
            await api.push("q", 1)
            assert data(await api.pop("q")) == [1]
        assert broker.stop() == 0
