"""What is answered `buffered` arrives: once, in order, with its ids, whatever dies in between."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from tests.brokers import LiveBroker, postgres_environment, running_broker
from tests.http.api import Api, Json, data, open_api
from tests.live.load import Producer, take_all

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from queen_trio.store.settings import ConnectionSettings
    from tests.cluster import Cluster

SECONDS = 60
KEY = "5e" * 32


async def wait_drained(api: Api) -> None:
    while (await api.buffers())["bufferedMessages"]:  # noqa: ASYNC110 - another process
        await trio.sleep(0.02)


async def switch(api: Api, *, enabled: bool) -> None:
    response = await api.http.post("/api/v1/system/maintenance", json={"enabled": enabled})
    assert response.status_code == 200, response.text


def statuses(results: list[Json]) -> set[str]:
    return {result["status"] for result in results}


async def take_messages(api: Api, queue: str) -> list[Json]:
    taken: list[Json] = []
    while answer := await api.pop(queue, autoAck=True, batch=1000, partitions=0):
        taken += answer["messages"]
    return taken


async def test_an_outage_costs_neither_messages_nor_order(own_cluster: Cluster) -> None:
    environment = postgres_environment(own_cluster.settings("postgres"))
    with running_broker(environment) as broker, trio.fail_after(SECONDS):
        async with open_api(broker) as api:
            assert statuses(await api.push("q", 0, partition="a")) == {"queued"}
            await trio.to_thread.run_sync(own_cluster.stop)
            answers: list[Json] = []
            for n in range(1, 21):
                started = trio.current_time()
                answers += await api.push_items(
                    {"queue": "q", "payload": n, "partition": "a", "transactionId": f"t{n}"},
                    {"queue": "q", "payload": -n, "partition": "b"},
                )
                assert trio.current_time() - started < 5
            assert statuses(answers) == {"buffered"}
            assert (await api.buffers())["bufferedMessages"] == 40
            await trio.to_thread.run_sync(own_cluster.start)
            await wait_drained(api)
            messages = await take_messages(api, "q")
            by_partition = {
                name: [m["data"] for m in messages if m["partition"] == name] for name in "ab"
            }
            assert by_partition == {"a": list(range(21)), "b": [-n for n in range(1, 21)]}
            told = {a["message_id"]: a["transaction_id"] for a in answers}
            assert told == {m["id"]: m["transactionId"] for m in messages if m["data"] != 0}
            assert statuses(await api.push("q", 99)) == {"queued"}


async def test_kill_9_loses_nothing_that_was_buffered(own_cluster: Cluster) -> None:
    """Nor brings it twice: PostgreSQL dies under load, then the broker, while it writes."""
    environment = postgres_environment(own_cluster.settings("postgres"))
    with running_broker(environment) as broker, trio.fail_after(SECONDS):
        producer = Producer(broker, "q")
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(producer.run)
            await producer.wait_queued(300)
            await trio.to_thread.run_sync(own_cluster.kill)
            while len(producer.buffered) < 300:  # noqa: ASYNC110 - several tasks count
                await trio.sleep(0.01)
            await trio.to_thread.run_sync(broker.kill)
        await trio.to_thread.run_sync(own_cluster.start)
        await trio.to_thread.run_sync(broker.restart)
        async with open_api(broker) as api:
            await wait_drained(api)
            producer.check(await take_all(api, "q"))
            assert not producer.failed


async def test_maintenance_outlives_a_restart(broker: LiveBroker) -> None:
    with trio.fail_after(SECONDS):
        async with open_api(broker) as api:
            await switch(api, enabled=True)
            assert statuses(await api.push("q", 1, 2)) == {"buffered"}
        assert await trio.to_thread.run_sync(broker.stop) == 0
        await trio.to_thread.run_sync(broker.restart)
        async with open_api(broker) as api:
            assert (await api.buffers())["bufferedMessages"] == 2
            assert statuses(await api.push("q", 3)) == {"buffered"}
            assert await api.pop("q") is None
            await switch(api, enabled=False)
            await wait_drained(api)
            assert await take_all(api, "q") == [1, 2, 3]


# -- commits whose fate nobody knows ---------------------------------------------------------------


class ReplyCutter:
    """Passes TCP on; while `armed`, a reply breaks its connection: what it tells has happened."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self.armed = False
        self.cuts = 0

    async def serve_connection(self, client: trio.SocketStream) -> None:
        async with (
            await trio.open_tcp_stream("127.0.0.1", self.target) as server,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(self._pump, client, server, nursery.cancel_scope, False)
            nursery.start_soon(self._pump, server, client, nursery.cancel_scope, True)
        await trio.aclose_forcefully(client)

    async def _pump(
        self,
        source: trio.SocketStream,
        sink: trio.SocketStream,
        scope: trio.CancelScope,
        replies: bool,
    ) -> None:
        try:
            while chunk := await source.receive_some(65536):
                if replies and self.armed:
                    self.cuts += 1
                    break
                await sink.send_all(chunk)
        except (OSError, trio.BrokenResourceError):
            pass
        scope.cancel()


@asynccontextmanager
async def cut_off(
    settings: ConnectionSettings, **more: str
) -> AsyncIterator[tuple[Api, ReplyCutter]]:
    """A broker that reaches its database through a cutter."""
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    cutter = ReplyCutter(settings.port)
    environment = postgres_environment(settings) | {
        "PG_HOST": "127.0.0.1",
        "PG_PORT": str(listener.socket.getsockname()[1]),
        "DB_POOL_SIZE": "4",
        **more,
    }
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, cutter.serve_connection, [listener])
        broker = LiveBroker(environment)
        await trio.to_thread.run_sync(broker.start)
        try:
            async with open_api(broker) as api:
                yield api, cutter
        finally:
            await trio.to_thread.run_sync(broker.kill)
            nursery.cancel_scope.cancel()


def stored_messages(cluster: Cluster, database: str) -> int:
    [[count]] = cluster.execute(
        "SELECT coalesce(sum(last_offset + 1), 0) FROM queen.log_partitions", database
    )
    return int(count)


async def test_an_ambiguous_commit_lands_once(
    cluster: Cluster, database: str, tmp_path: Path
) -> None:
    """The reply to COMMIT is lost; the queue has no window that would find a repeated id."""
    settings = cluster.settings(database, tcp=True)
    with trio.fail_after(SECONDS):
        async with cut_off(settings, FILE_BUFFER_DIR=str(tmp_path)) as (api, cutter):
            await api.configure("q", options={"dedupWindowSeconds": 0})
            await api.push("q", 0, transactionId="t")
            cutter.armed = True
            results = await api.push("q", 1, transactionId="t")
            assert statuses(results) == {"buffered"}
            assert cutter.cuts
            assert stored_messages(cluster, database) == 2  # it was committed
            # Without a window another message may have the same id: it's not taken for the first.
            assert statuses(await api.push("q", 2, transactionId="t")) == {"buffered"}
            cutter.armed = False
            await wait_drained(api)
            assert stored_messages(cluster, database) == 3
            messages = await take_messages(api, "q")
            assert [m["data"] for m in messages] == [0, 1, 2]
            assert messages[1]["id"] == results[0]["message_id"]
            assert (await api.buffers())["bufferStats"]["quarantinedRecords"] == 0


async def test_what_repeats_a_message_inside_the_window_is_dropped(broker: LiveBroker) -> None:
    with trio.fail_after(SECONDS):
        async with open_api(broker) as api:
            await api.push("q", "first", transactionId="t")
            await switch(api, enabled=True)
            await api.push("q", "again", transactionId="t")
            await api.push_items(
                {"queue": "q", "payload": "and again", "transactionId": "t"},
                {"queue": "q", "payload": "new", "transactionId": "u"},
            )
            await switch(api, enabled=False)
            await wait_drained(api)
            assert [m["data"] for m in await take_messages(api, "q")] == ["first", "new"]


# -- the disk --------------------------------------------------------------------------------------


async def test_a_second_broker_is_refused(broker: LiveBroker, settings: ConnectionSettings) -> None:
    async with open_api(broker) as api:
        directory = (await api.buffers())["bufferStats"]["directory"]
    second = LiveBroker(postgres_environment(settings) | {"FILE_BUFFER_DIR": directory})
    await trio.to_thread.run_sync(second.launch)
    assert await trio.to_thread.run_sync(second.wait) == 1
    [fatal] = [line for line in second.stderr if "FATAL" in line]
    assert f"another broker (pid {broker.process.pid}) uses the spool {directory}" in fatal
    assert "FILE_BUFFER_DIR" in fatal
    assert "Traceback" not in "".join(second.stderr)


async def test_a_full_spool_refuses_and_says_so(settings: ConnectionSettings) -> None:
    environment = postgres_environment(settings) | {"FILE_BUFFER_MAX_BYTES": str(1 << 20)}
    with running_broker(environment) as broker, trio.fail_after(SECONDS):
        async with open_api(broker) as api:
            await switch(api, enabled=True)
            assert statuses(await api.push("q", "x" * 700_000)) == {"buffered"}
            results = await api.push_items(
                {"queue": "q", "payload": "y" * 700_000, "partition": "large"},
                {"queue": "q", "payload": "z", "partition": "small"},
            )
            assert [r["status"] for r in results] == ["failed", "buffered"]
            assert "the spool is full (FILE_BUFFER_MAX_BYTES is 1048576)" in results[0]["error"]
            assert not (await api.buffers())["bufferHealthy"]
            body = {"items": [{"queue": "q", "payload": "w" * 700_000}]}
            response = await api.http.post("/api/v1/push", json=body)
            assert response.status_code == 500
            assert "the spool is full" in response.json()["error"]
            await switch(api, enabled=False)
            await wait_drained(api)
            assert (await api.buffers())["bufferHealthy"]
            assert {len(m["data"]) for m in await take_messages(api, "q")} == {700_000, 1}


async def test_pushes_work_without_a_spool(settings: ConnectionSettings) -> None:
    environment = postgres_environment(settings) | {"FILE_BUFFER_DIR": "/dev/null/spool"}
    with running_broker(environment) as broker, trio.fail_after(SECONDS):
        warning = broker.wait_event("spool not writable: while PostgreSQL is away pushes will fail")
        assert warning["level"] == "warning"
        async with open_api(broker) as api:
            assert statuses(await api.push("q", 1)) == {"queued"}
            stats = await api.buffers()
            assert not stats["bufferHealthy"]
            assert "Not a directory" in stats["bufferStats"]["error"]
            await switch(api, enabled=True)
            body = {"items": [{"queue": "q", "payload": 2}]}
            response = await api.http.post("/api/v1/push", json=body)
            assert response.status_code == 500
            assert "the spool can't be written" in response.json()["error"]


async def test_payloads_are_encrypted_in_the_spool(settings: ConnectionSettings) -> None:
    environment = postgres_environment(settings) | {"QUEEN_ENCRYPTION_KEY": KEY}
    with running_broker(environment) as broker, trio.fail_after(SECONDS):
        async with open_api(broker) as api:
            await api.configure("sealed", options={"encryptionEnabled": True})
            await switch(api, enabled=True)
            for queue in ("sealed", "plain"):
                assert statuses(await api.push(queue, {"secret": "hush"})) == {"buffered"}
            stats = (await api.buffers())["bufferStats"]
            [file] = await trio.Path(stats["directory"]).glob("*.spool")
            assert b"hush" not in await file.read_bytes()
            await switch(api, enabled=False)
            await wait_drained(api)
            for queue in ("sealed", "plain"):
                assert data(await api.pop(queue)) == [{"secret": "hush"}]


REFUSE = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION 'not this one'; END $$;
CREATE TRIGGER refuse BEFORE INSERT ON queen.log_partitions
    FOR EACH ROW WHEN (NEW.name = 'bad') EXECUTE FUNCTION refuse();
"""


def run_cli(environment: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "queen_trio", "spool", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


async def test_a_record_refused_for_good_is_kept_for_an_operator(
    cluster: Cluster, database: str, tmp_path: Path
) -> None:
    environment = postgres_environment(cluster.settings(database)) | {
        "FILE_BUFFER_DIR": str(tmp_path),
        "FILE_BUFFER_FLUSH_MS": "10",
    }
    with running_broker(environment) as broker, trio.fail_after(SECONDS):
        async with open_api(broker) as api:
            for statement in REFUSE.strip().split(";\n\n"):
                cluster.execute(statement, database)
            await switch(api, enabled=True)
            for n, partition in enumerate(["good", "bad", "good", "fine"]):
                await api.push("q", n, partition=partition)
            await switch(api, enabled=False)
            await wait_drained(api)
            stats = (await api.buffers())["bufferStats"]
            assert (stats["quarantinedRecords"], stats["replayedMessages"]) == (1, 3)
            assert broker.wait_event("spool: record quarantined")["partition"] == "bad"
            assert sorted(await take_all(api, "q")) == [0, 2, 3]
        refused = run_cli(environment, "ls")
        assert refused.returncode == 1
        assert "another broker" in refused.stderr
        assert await trio.to_thread.run_sync(broker.stop) == 0
        [line] = run_cli(environment, "ls").stdout.splitlines()
        kind, name, where, error = line.split("\t")
        assert (kind, where) == ("failed", "q/bad")
        assert "not this one" in error
        shown = run_cli(environment, "show", name)
        assert json.loads(shown.stdout)["data"] == 1
        assert "will be replayed" in run_cli(environment, "replay", name).stdout
        cluster.execute("DROP TRIGGER refuse ON queen.log_partitions", database)
        await trio.to_thread.run_sync(broker.restart)
        async with open_api(broker) as api:
            await wait_drained(api)
            assert await take_all(api, "q") == [1]
            assert (await api.buffers())["bufferStats"]["quarantinedRecords"] == 0
