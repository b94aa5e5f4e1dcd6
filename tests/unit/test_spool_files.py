"""The spool on a real disk: what is answered is there, in order, once, however it ended before."""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import structlog
import trio

from queen_trio.errors import DatabaseError, DatabaseUnavailable
from queen_trio.grace import Grace
from queen_trio.spool import Drain, Spool, SpoolInUse, SpoolRecord, open_spool, writer
from queen_trio.spool import directory as spool_directory
from queen_trio.spool.records import encode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

PLENTY = 1 << 30


def record(n: int, partition: str = "p", size: int = 0) -> SpoolRecord:
    return SpoolRecord("q", partition, (b'{"n":%d%b}' % (n, b" " * size),))


def numbers(records: Sequence[SpoolRecord]) -> list[int]:
    return [json.loads(message)["n"] for record in records for message in record.messages]


async def take_all(spool: Spool) -> list[int]:
    taken: list[int] = []
    while records := await spool.peek(3):
        taken += numbers(records)
        await spool.advance(len(records))
    return taken


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.spool"))


async def test_first_in_first_out(tmp_path: Path) -> None:
    async with open_spool(tmp_path / "a" / "b", PLENTY) as spool:
        assert await spool.append([record(0), record(1)]) == [None, None]
        assert await spool.append([record(2)]) == [None]
        assert spool.statistics().pending_messages == 3
        assert await take_all(spool) == [0, 1, 2]
        assert spool.statistics().pending_bytes == 0
        assert (spool.statistics().spooled_messages, spool.statistics().replayed_messages) == (3, 3)
    assert files(tmp_path / "a" / "b") == []


async def test_records_outlive_the_process(tmp_path: Path) -> None:
    """What is on the disk counts from the start, and comes before what is new."""
    async with open_spool(tmp_path, PLENTY) as spool:
        for n in range(5):
            await spool.append([record(n)])
        await spool.advance(len(await spool.peek(2)))  # of a file that stays
    async with open_spool(tmp_path, PLENTY) as spool:
        assert spool.statistics().pending_messages == 5
        await spool.append([record(5)])
        assert await take_all(spool) == [0, 1, 2, 3, 4, 5]


async def test_one_fsync_serves_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    really = os.fsync

    def counted(descriptor: int) -> None:
        nonlocal count
        count += 1
        really(descriptor)

    async with open_spool(tmp_path, PLENTY) as spool:
        await spool.append([record(0)])
        monkeypatch.setattr(os, "fsync", counted)
        async with trio.open_nursery() as nursery:
            for n in range(1, 101):
                nursery.start_soon(spool.append, [record(n)])
        assert sorted(await take_all(spool)) == list(range(101))
        assert 1 <= count < 10


async def test_a_cancelled_push_takes_nobody_elses_record_along(tmp_path: Path) -> None:

    async def append(n: int, scope: trio.CancelScope) -> None:
        with scope:
            assert await spool.append([record(n)]) == [None]

    async with open_spool(tmp_path, PLENTY) as spool, trio.open_nursery() as nursery:
        for n in range(20):
            scope = trio.CancelScope()
            nursery.start_soon(append, n, scope)
            if n % 3 == 0:
                scope.cancel()
    async with open_spool(tmp_path, PLENTY) as spool:
        stored = await take_all(spool)
    assert {n for n in range(20) if n % 3} <= set(stored)
    assert len(stored) == len(set(stored))


async def test_a_torn_record_is_cut_off(tmp_path: Path) -> None:
    async with open_spool(tmp_path, PLENTY) as spool:
        await spool.append([record(0), record(1)])
    [name] = files(tmp_path)
    os.truncate(tmp_path / name, (tmp_path / name).stat().st_size - 1)
    async with open_spool(tmp_path, PLENTY) as spool:
        assert spool.statistics().pending_messages == 1
        assert await take_all(spool) == [0]
        assert spool.statistics().quarantined == 0


async def damaged_file(tmp_path: Path) -> Path:
    """A file of the records 0 to 2, of which 1 was changed on the disk."""
    async with open_spool(tmp_path, PLENTY) as spool:
        await spool.append([record(n) for n in range(3)])
    [name] = files(tmp_path)
    path = tmp_path / name
    data = bytearray(path.read_bytes())
    data[len(encode(record(0))) + 30] ^= 1
    path.write_bytes(data)
    return path


async def test_a_damaged_record_is_kept_for_later(tmp_path: Path) -> None:
    await damaged_file(tmp_path)
    async with open_spool(tmp_path, PLENTY) as spool:
        assert await take_all(spool) == [0, 2]
        assert spool.statistics().quarantined == 1
    [damaged] = (tmp_path / "failed").glob("*.damaged")
    assert len(damaged.read_bytes()) == len(encode(record(1)))
    assert "changed" in json.loads(damaged.with_suffix(".error").read_text())["error"]


async def test_files_end_and_go_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_directory, "FILE_BYTES", 2 * len(encode(record(0))))
    async with open_spool(tmp_path, PLENTY) as spool:
        for n in range(6):
            await spool.append([record(n)])
        many = len(files(tmp_path))
        assert many == 3
        await spool.advance(len(await spool.peek(2)))
        assert len(files(tmp_path)) == many - 1
        assert await take_all(spool) == [2, 3, 4, 5]


async def test_a_full_spool_says_so_until_there_is_room(tmp_path: Path) -> None:
    async with open_spool(tmp_path, len(encode(record(0))) * 2) as spool:
        answers = await spool.append([record(n) for n in range(3)])
        assert answers[:2] == [None, None]
        assert "FILE_BUFFER_MAX_BYTES" in str(answers[2])
        assert not spool.statistics().healthy
        assert spool.statistics().refused_messages == 1
        await spool.advance(len(await spool.peek(2)))
        assert spool.statistics().healthy
        assert await spool.append([record(9)]) == [None]
        assert await take_all(spool) == [9]


async def test_the_directory_has_one_user(tmp_path: Path) -> None:
    async with open_spool(tmp_path, PLENTY) as spool:
        await spool.append([record(0)])
        with pytest.raises(SpoolInUse, match=rf"pid {os.getpid()}.*FILE_BUFFER_DIR"):
            async with open_spool(tmp_path, PLENTY):
                pass
        assert await spool.append([record(1)]) == [None]


async def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    """A warning and refusals, and it is tried again."""
    (tmp_path / "file").write_text("")
    async with open_spool(tmp_path / "file" / "spool", PLENTY) as spool:
        assert not spool.statistics().healthy
        [error] = await spool.append([record(0)])
        assert "can't be written" in str(error)
        assert await spool.peek(1) == []
        (tmp_path / "file").unlink()
        assert await spool.append([record(0)]) == [None]
        assert spool.statistics().healthy
        assert await take_all(spool) == [0]


async def test_records_behind_a_disk_that_failed_at_boot(
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    """They are found once it works, even if no push needs the spool."""
    async with open_spool(tmp_path / "elsewhere", PLENTY) as spool:
        await spool.append([record(0)])
    (tmp_path / "spool").write_text("")
    async with open_spool(tmp_path / "spool", PLENTY) as spool:
        mock_clock.jump(writer.REOPEN_SECONDS)
        assert await spool.peek(1) == []
        (tmp_path / "spool").unlink()
        (tmp_path / "elsewhere").rename(tmp_path / "spool")
        assert await spool.peek(1) == []  # not at every look
        assert not spool.statistics().healthy
        mock_clock.jump(writer.REOPEN_SECONDS)
        assert await take_all(spool) == [0]
        assert spool.statistics().healthy


FULL_DISK = """
import resource, signal, sys, trio
from pathlib import Path
from queen_trio.spool import SpoolRecord, open_spool

async def main():
    async with open_spool(Path(sys.argv[1]), 1 << 30) as spool:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        assert await spool.append([SpoolRecord("q", "p", (b'{"n":0}',))]) == [None]
        # From here on the system refuses to let a file grow past this, as a full disk would.
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))
        [error] = await spool.append([SpoolRecord("q", "p", (b'{"n":1}' + b" " * 5000,))])
        assert "can't be written" in error, error
        assert not spool.statistics().healthy
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert await spool.append([SpoolRecord("q", "p", (b'{"n":2}',))]) == [None]
        assert spool.statistics().healthy

trio.run(main)
"""


async def test_a_write_that_fails_halfway_leaves_nothing_behind(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    await trio.run_process([sys.executable, "-c", FULL_DISK, str(tmp_path)])
    async with open_spool(tmp_path, PLENTY) as spool:
        assert await take_all(spool) == [0, 2]
        assert spool.statistics().quarantined == 0


# -- the replay ------------------------------------------------------------------------------------


class Database:
    """Takes records, in parts of `most`, unless it is away or they are among those it refuses."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.calls = 0
        self.away = False
        self.refuses: set[int] = set()
        self.most = 1000

    async def replay(self, records: Sequence[SpoolRecord]) -> int:
        self.calls += 1
        await trio.lowlevel.checkpoint()
        if self.away:
            raise DatabaseUnavailable("away")
        if self.refuses & set(numbers(records)):
            raise DatabaseError("refused", sqlstate="22P05")
        part = records[: self.most]
        self.taken += numbers(part)
        return len(part)


async def test_the_drain_replays_in_order(
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    database = Database()
    database.most = 2
    paused = [True]
    async with open_spool(tmp_path, PLENTY) as spool:
        drain = Drain(spool, database.replay, lambda: paused[0], 3)
        await spool.append([record(n) for n in range(8)])
        await drain.run()
        assert database.taken == []
        paused[0] = False
        await drain.run()
        assert database.taken == list(range(8))
        assert not spool.statistics().pending_records


async def test_the_drain_waits_for_the_database(
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    database = Database()
    database.away = True
    async with open_spool(tmp_path, PLENTY) as spool:
        drain = Drain(spool, database.replay, lambda: False, 3)
        await spool.append([record(n) for n in range(4)])
        for _ in range(50):
            await drain.run()
            mock_clock.jump(0.1)
        assert 4 < database.calls < 12  # it asks less and less often, but once a second
        database.away = False
        mock_clock.jump(1.0)
        await drain.run()
        assert database.taken == [0, 1, 2, 3]


async def test_a_record_refused_for_good_is_set_aside(tmp_path: Path) -> None:
    """After five times, with its error; those before and behind it go on."""
    database = Database()
    database.refuses = {2}
    async with open_spool(tmp_path, PLENTY) as spool:
        drain = Drain(spool, database.replay, lambda: False, 4)
        await spool.append([record(n) for n in range(6)])
        for attempt in range(5):
            assert spool.statistics().quarantined == 0, attempt
            await drain.run()
        assert database.taken == [0, 1, 3, 4, 5]
        assert spool.statistics().quarantined == 1
        assert spool.statistics().pending_records == 0
    [kept] = (tmp_path / "failed").glob("*.spool")
    assert kept.read_bytes() == encode(record(2))
    report = json.loads(kept.with_suffix(".error").read_text())
    assert (report["error"], report["attempts"], report["queue"]) == ("refused", 5, "q")
    async with open_spool(tmp_path, PLENTY) as spool:
        assert spool.statistics().quarantined == 1
        assert await spool.peek(1) == []


async def test_a_crash_after_setting_aside_sets_aside_once(tmp_path: Path) -> None:
    """The file is replayed from its start: the same record gets the same name."""
    async with open_spool(tmp_path, PLENTY) as spool:
        await spool.append([record(0), record(1)])
    [name] = files(tmp_path)
    data = (tmp_path / name).read_bytes()
    for _ in range(2):
        (tmp_path / name).write_bytes(data)
        async with open_spool(tmp_path, PLENTY) as spool:
            await spool.peek(2)
            await spool.quarantine("no", 5)
            assert spool.statistics().quarantined == 1


async def test_a_fault_of_ours_blocks_no_record_behind_it(tmp_path: Path) -> None:
    """It is told to whoever runs the job each time, and set aside in the end as if refused."""
    database = Database()

    async def replay(records: Sequence[SpoolRecord]) -> int:
        if 2 in numbers(records):
            raise ZeroDivisionError("a fault\nthat nobody foresaw")
        return await database.replay(records)

    async with open_spool(tmp_path, PLENTY) as spool:
        drain = Drain(spool, replay, lambda: False, 4)
        await spool.append([record(n) for n in range(6)])
        for _ in range(4):
            with pytest.raises(ZeroDivisionError):
                await drain.run()
            assert spool.statistics().quarantined == 0
        await drain.run()
        assert database.taken == [0, 1, 3, 4, 5]
        assert spool.statistics().quarantined == 1
        assert spool.statistics().pending_records == 0
    [kept] = (tmp_path / "failed").glob("*.spool")
    assert kept.read_bytes() == encode(record(2))
    report = json.loads(kept.with_suffix(".error").read_text())
    assert report["error"] == "ZeroDivisionError: a fault\nthat nobody foresaw"


async def test_a_fault_of_ours_answers_all_who_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever wrote for all of them gets the fault itself."""
    answers: list[str | None] = []
    faults: list[BaseException] = []

    async def append(spool: Spool, n: int) -> None:
        try:
            answers.extend(await spool.append([record(n)]))
        except ZeroDivisionError as fault:
            faults.append(fault)

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    async with open_spool(tmp_path, PLENTY) as spool:
        with monkeypatch.context() as patch, trio.fail_after(10):
            patch.setattr(spool_directory, "_write", broken)
            async with trio.open_nursery() as nursery:
                for n in range(20):
                    nursery.start_soon(append, spool, n)
        assert len(faults) + len(answers) == 20
        assert faults
        assert all(answer is not None and "can't be written" in answer for answer in answers)
        assert spool.statistics().refused_messages == 20
        assert not spool.statistics().healthy
        assert await spool.append([record(99)]) == [None]
        assert spool.statistics().healthy
        assert await take_all(spool) == [99]


# -- a disk that takes no part ---------------------------------------------------------------------


@contextmanager
def irremovable(path: Path) -> Iterator[None]:
    """A name that can't be unlinked for the block's time, not even by root."""
    path.rename(path.with_suffix(".kept"))
    path.mkdir()
    yield
    path.rmdir()
    path.with_suffix(".kept").rename(path)


async def test_a_replayed_file_that_stays_is_replayed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those behind it go on, it is said once, and it goes when the disk allows it again."""
    monkeypatch.setattr(spool_directory, "FILE_BYTES", 2 * len(encode(record(0))))
    said: list[str] = []
    monkeypatch.setattr(
        spool_directory,
        "log",
        structlog.wrap_logger(None, processors=[lambda _l, _m, event: _keep(said, event)]),
    )
    database = Database()
    async with open_spool(tmp_path, PLENTY) as spool:
        drain = Drain(spool, database.replay, lambda: False, 3)
        for n in range(4):
            await spool.append([record(n)])
        first, second = files(tmp_path)
        await spool.peek(1)  # its records are in memory
        with irremovable(tmp_path / first):
            for _ in range(3):
                await drain.run()
            assert database.taken == [0, 1, 2, 3]
            assert spool.statistics().pending_messages == 0
            assert spool.statistics().pending_bytes == 0
            assert spool.statistics().replayed_messages == 4
            assert "directory" in str(spool.statistics().trouble)
            assert said == ["spool: files that are done with stay"]
            assert await spool.append([record(4)]) == [None]
            await drain.run()
            assert database.taken == [0, 1, 2, 3, 4]
        await drain.run()
        assert files(tmp_path) == []
        assert spool.statistics().healthy
        assert said[1:] == ["spool: files that are done with are gone"]
    assert second not in files(tmp_path)


def _keep(said: list[str], event: Any) -> Any:
    said.append(event["event"])
    raise structlog.DropEvent


async def test_a_record_that_cannot_be_set_aside_keeps_its_file(tmp_path: Path) -> None:
    """It blocks none of those behind it meanwhile, which may be what makes room for it."""
    database = Database()
    database.refuses = {1}
    async with open_spool(tmp_path, PLENTY) as spool:
        await spool.append([record(n) for n in range(3)])
        (tmp_path / "failed").rmdir()
        drain = Drain(spool, database.replay, lambda: False, 3)
        for _ in range(6):
            await drain.run()
        assert database.taken == [0, 2]
        assert (spool.statistics().pending_records, spool.statistics().quarantined) == (0, 0)
        assert not spool.statistics().healthy
    async with open_spool(tmp_path, PLENTY) as spool:  # after a crash it is all there
        assert numbers(await spool.peek(10)) == [0, 1, 2]
        (tmp_path / "failed").rmdir()
        await spool.advance(1)
        await spool.quarantine("no", 5)
        await spool.advance(1)
        assert files(tmp_path) != []
        (tmp_path / "failed").mkdir()
        assert await spool.peek(10) == []
        assert files(tmp_path) == []
        assert spool.statistics().quarantined == 1
        assert spool.statistics().healthy
    [kept] = (tmp_path / "failed").glob("*.spool")
    assert kept.read_bytes() == encode(record(1))


async def test_damage_that_cannot_be_set_aside_keeps_the_file(tmp_path: Path) -> None:
    """Neither it nor what is around it may get lost meanwhile."""
    path = await damaged_file(tmp_path)
    data = path.read_bytes()
    async with open_spool(tmp_path, PLENTY) as spool:
        (tmp_path / "failed").rmdir()
        assert await take_all(spool) == [0, 2]
        assert path.read_bytes() == data
        assert spool.statistics().quarantined == 0
        (tmp_path / "failed").mkdir()
        assert await take_all(spool) == []
        assert files(tmp_path) == []
        assert spool.statistics().quarantined == 1


async def test_a_disk_that_hangs_is_left_behind_at_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shutdown neither waits for it for ever nor says that something was spooled."""
    hanging, released = threading.Event(), threading.Event()

    def hang(_descriptor: int) -> None:
        hanging.set()
        released.wait()

    grace = Grace()
    answers: list[str | None] = []

    async def append(spool: Spool) -> None:
        answers.extend(await spool.append([record(0)]))

    try:
        with trio.fail_after(10), trio.CancelScope() as process:
            async with open_spool(tmp_path, PLENTY, grace) as spool, trio.open_nursery() as pushes:
                monkeypatch.setattr(os, "fsync", hang)
                pushes.start_soon(append, spool)
                while not hanging.is_set():  # noqa: ASYNC110 - a thread
                    await trio.sleep(0.001)
                pushes.start_soon(append, spool)
                process.deadline = trio.current_time() + 0.05
                grace.limit(process.deadline)
        assert process.cancelled_caught
        assert answers == []
    finally:
        released.set()
