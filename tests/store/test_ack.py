"""Ack: verdict by verdict, letter by letter (spec 2, "Ack"; sql/functions/040_ack.sql)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pytest

from tests.store.calls import GROUP, Target, ids, letter_of

if TYPE_CHECKING:
    from tests.store.calls import Log

NAMES = "abcdef"


@pytest.fixture
async def partition(log: Log) -> UUID:
    """q/p with a to f in two segments, all leased in one batch."""
    pushed = await log.push("a", "b")
    await log.push("c", "d", "e", "f")
    assert ids(await log.pop()) == list(NAMES)
    return pushed.partition_id


async def state(log: Log, partition: UUID) -> tuple[Any, ...]:
    """(committed, batch_end, attempt_offset, attempt_count)"""
    cursor = await log.cursor(partition)
    assert cursor is not None
    return tuple(cursor[k] for k in ("committed", "batch_end", "attempt_offset", "attempt_count"))


async def dead_letters(log: Log) -> list[tuple[Any, ...]]:
    return await log.execute(
        'SELECT "offset", transaction_id, message_id, payload, error, retry_count'
        ' FROM queen.log_dlq ORDER BY "offset"'
    )


# What one call says about a leased batch a to f; the verdicts; the cursor; whether the lease ends.
TABLE = [
    ("a:c", "c", 0, False),
    ("a:c b:c", "cc", 1, False),
    ("c:c a:c", "cc", 2, False),
    ("c:c", "c", 2, False),  # the gap below is implied
    ("f:c", "c", 5, True),
    ("a:c b:c c:c d:c e:c f:c", "cccccc", 5, True),
    ("a:c a:c", "cc", 0, False),
    ("x:c", "u", -1, False),
    ("x:f", "u", -1, False),
    ("x:d y:r", "uu", -1, False),
    ("x:c b:c", "uc", 1, False),
    ("a:f", "f", -1, True),
    ("a:r", "r", -1, True),
    ("a:d", "d", 0, True),
    ("c:f", "f", -1, True),  # a and b are silent, with nothing completed above: they come again
    ("c:r", "r", -1, True),
    ("c:d", "d", -1, True),  # dead, and delivered again with a and b
    ("a:c b:c c:f", "ccf", 1, True),
    ("b:c c:f", "cf", 1, True),
    ("a:c d:f", "cf", 0, True),  # b and c are silent above the completed one
    ("b:c d:d", "cd", 1, True),
    ("c:c d:d", "cd", 3, True),
    ("c:c d:d e:c", "cdw", 3, True),
    ("a:f b:c", "fw", -1, True),
    ("b:c a:r", "wr", -1, True),
    ("a:c b:f c:c d:c", "cfww", 0, True),
    ("f:c c:f", "wf", 1, True),
    ("d:f b:f", "ff", -1, True),
    ("a:c b:f d:d", "cfw", 0, True),
    ("a:c b:r d:f", "crf", 0, True),
    ("a:c b:d d:f", "cdf", 1, True),
    ("a:f a:d", "fd", 0, True),  # at one offset d beats f beats r
    ("a:d a:f a:r", "dfr", 0, True),
    ("a:r a:f", "rf", -1, True),
    ("a:c a:f", "wf", -1, True),
    ("a:d a:c", "dc", 0, True),
    ("f:d e:c", "dc", 5, True),
    ("x:f a:c", "uc", 0, False),
    ("x:c a:f", "uf", -1, True),
]


class TestVerdicts:
    @pytest.mark.parametrize(("words", "verdicts", "committed", "released"), TABLE)
    async def test_one_call(
        self,
        log: Log,
        partition: UUID,
        words: str,
        verdicts: str,
        committed: int,
        released: bool,
    ) -> None:
        row = await log.ack(partition, words)
        assert (row.verdicts, row.lease_released) == (verdicts, released)
        got = await state(log, partition)
        assert got[:2] == (committed, None if released else 5)
        rest = ids(await log.pop(lease_id="next"))
        assert rest == (list(NAMES[committed + 1 :]) if released else [])

    async def test_total_consumed_counts_what_is_done(self, log: Log, partition: UUID) -> None:
        await log.ack(partition, "c:c")
        await log.ack(partition, "f:c")
        cursor = await log.cursor(partition)
        assert cursor is not None
        assert (cursor["total_consumed"], cursor["batch_retry_count"]) == (6, 0)


class TestWholeBatches:
    """Said in order, a completed batch takes a path of its own, wherever segments begin and end."""

    @pytest.mark.parametrize("size", range(1, 7))
    async def test_batch_after_batch(self, log: Log, size: int) -> None:
        pushed = await log.push("a", "b")
        await log.push("c", "d", "e", "f")
        for start in range(0, len(NAMES), size):
            names = list(NAMES[start : start + size])
            assert ids(await log.pop(batch=size)) == names
            row = await log.ack(pushed.partition_id, " ".join(f"{name}:c" for name in names))
            assert (row.verdicts, row.lease_released) == ("c" * len(names), True)
            assert (row.queue_name, row.partition_name) == ("q", "p")
            assert row.has_more is (names[-1] != "f")
            got = await state(log, pushed.partition_id)
            assert got == (start + len(names) - 1, None, None, 0)
        assert await log.pop() == []

    async def test_other_ids_of_that_number(self, log: Log, partition: UUID) -> None:
        row = await log.ack(partition, "b:c c:c d:c e:c f:c g:c")
        assert (row.verdicts, row.lease_released) == ("cccccu", True)

    async def test_under_a_lost_lease(self, log: Log, partition: UUID) -> None:
        row = await log.ack(partition, "a:c b:c c:c d:c e:c f:c", lease="another")
        assert (row.verdicts, row.lease_released) == ("llllll", False)

    async def test_a_failure_is_forgotten(self, log: Log, partition: UUID) -> None:
        await log.ack(partition, "a:c b:f")
        assert await state(log, partition) == (0, None, 1, 1)
        await log.pop(batch=2)
        row = await log.ack(partition, "b:c c:c")
        assert row.verdicts == "cc"
        assert await state(log, partition) == (2, None, None, 0)


class TestSaidWhole:
    """The caller knows that it is the whole batch: no hashes, and a quick no where it is not."""

    async def test_it_completes_the_batch(self, log: Log) -> None:
        pushed = await log.push(*NAMES)
        assert ids(await log.pop(batch=4)) == list(NAMES[:4])
        [row] = await log.ack_whole(Target(pushed.partition_id, whole=4))
        assert row == (1, "", True, None, "q", "p", True)
        cursor = await log.cursor(pushed.partition_id)
        assert cursor is not None
        assert cursor["worker_id"] is cursor["lease_expires_at"] is None
        assert (cursor["total_consumed"], cursor["batch_retry_count"]) == (4, 0)
        assert ids(await log.pop()) == list(NAMES[4:])
        [row] = await log.ack_whole(Target(pushed.partition_id, whole=2))
        assert row == (1, "", True, None, "q", "p", False)
        assert await state(log, pushed.partition_id) == (5, None, None, 0)

    async def test_the_rest_of_a_batch(self, log: Log, partition: UUID) -> None:
        await log.ack(partition, "a:c b:c")
        [row] = await log.ack_whole(Target(partition, whole=4))
        assert (row.verdicts, row.lease_released) == ("", True)
        assert await state(log, partition) == (5, None, None, 0)

    async def test_a_failure_is_forgotten(self, log: Log, partition: UUID) -> None:
        await log.ack(partition, "a:c b:f")
        await log.pop(batch=2)
        await log.ack_whole(Target(partition, whole=2))
        assert await state(log, partition) == (2, None, None, 0)

    @pytest.mark.parametrize(
        "wrong",
        [
            {"whole": 5},
            {"whole": 7},
            {"lease": "another"},
            {"lease": ""},
            {"group": "g"},
            {"partition_id": UUID(int=9)},
        ],
        ids=str,
    )
    async def test_what_is_not_it_changes_nothing(
        self, log: Log, partition: UUID, wrong: dict[str, Any]
    ) -> None:
        before = await log.cursor(partition)
        target = {"partition_id": partition, "whole": 6} | wrong
        assert await log.ack_whole(Target(**target)) == [REFUSED]
        assert await log.cursor(partition) == before

    async def test_an_expired_lease(self, log: Log, partition: UUID) -> None:
        await log.expire()
        assert await log.ack_whole(Target(partition, whole=6)) == [REFUSED]

    async def test_twice(self, log: Log, partition: UUID) -> None:
        whole = Target(partition, whole=6)
        assert [row.verdicts for row in await log.ack_whole(whole, whole)] == ["", None]
        assert await log.ack_whole(whole) == [REFUSED]

    async def test_among_others(self, log: Log, partition: UUID) -> None:
        """Rows tell whose they are; targets of one cursor are applied as they stand."""
        parts = [(await log.push("z", partition=name)).partition_id for name in "xyz"]
        await log.pop(partitions=3, lease_id="three")
        x, y, z = parts
        rows = await log.ack_whole(
            Target(z, whole=1, lease="three"),
            Target(partition, [("a", "c"), ("b", "c")]),
            Target(y, [("z", "c")], lease="three"),
            Target(partition, whole=6),
            Target(partition, whole=4),
            Target(x, whole=2, lease="three"),
            Target(partition, [("c", "c")]),
            Target(x, [("z", "f")], lease="three"),
        )
        assert [(row.ord, row.verdicts) for row in rows] == list(
            enumerate(["", "cc", "c", None, "", None, "n", "f"], start=1)
        )
        assert [row.partition_name for row in rows] == ["z", None, "y", None, "p", None, None, "x"]
        assert [await log.committed(part) for part in (partition, *parts)] == [5, -1, 0, 0]


REFUSED = (1, None, False, None, None, None, False)


class TestCommittedAlready:
    async def test_completed_is_a_noop_everything_else_is_late(
        self, log: Log, partition: UUID
    ) -> None:
        await log.ack(partition, "b:c")
        row = await log.ack(partition, "a:c b:f a:r b:d")
        assert (row.verdicts, row.lease_released) == ("naaa", False)
        assert await state(log, partition) == (1, 5, None, 0)
        assert await dead_letters(log) == []

    async def test_mixed_with_live_ones(self, log: Log, partition: UUID) -> None:
        await log.ack(partition, "b:c")
        row = await log.ack(partition, "a:c b:f c:c x:c")
        assert row.verdicts == "nacu"
        assert (await state(log, partition))[0] == 2

    async def test_after_the_lease_is_gone(self, log: Log, partition: UUID) -> None:
        await log.ack(partition, "f:c")
        assert (await log.ack(partition, "a:c f:c c:f x:c")).verdicts == "nnal"
        assert (await log.ack(partition, "a:c c:f x:c", lease="")).verdicts == "nau"

    async def test_far_below_the_cursor(self, log: Log) -> None:
        for start in range(0, 12_000, 2_000):
            pushed = await log.push(*(f"m{n}" for n in range(start, start + 2_000)))
        await log.pop(batch=11_990, auto_ack=True)
        await log.pop()
        words = "m0:c m2999:f m3000:c m10989:c m10990:f m11989:c x:c m11990:c"
        assert (await log.ack(pushed.partition_id, words)).verdicts == "nannanuc"

    async def test_below_the_sidecar(self, log: Log, partition: UUID) -> None:
        await log.ack(partition, "b:c")
        await log.execute("DELETE FROM queen.log_txns WHERE end_offset < 2")
        await log.execute("UPDATE queen.log_partitions SET txns_start = 2, log_start = 2")
        assert (await log.ack(partition, "a:c c:c")).verdicts == "uc"

    async def test_after_retention(self, log: Log, partition: UUID) -> None:
        await log.ack(partition, "f:c")
        await log.retain_from(partition, 6)
        assert (await log.ack(partition, "a:c b:f")).verdicts == "na"


class TestLease:
    async def test_anothers_lease(self, log: Log, partition: UUID) -> None:
        row = await log.ack(partition, "a:c b:f", lease="other")
        assert (row.verdicts, row.lease_released) == ("ll", False)
        assert await state(log, partition) == (-1, 5, None, 0)

    async def test_an_expired_lease(self, log: Log, partition: UUID) -> None:
        await log.expire()
        assert (await log.ack(partition, "a:c")).verdicts == "l"
        assert (await state(log, partition))[0] == -1

    async def test_an_expired_lease_and_a_new_one(self, log: Log, partition: UUID) -> None:
        await log.expire()
        await log.pop(lease_id="new")
        assert (await log.ack(partition, "a:c")).verdicts == "l"
        assert (await log.ack(partition, "a:c", lease="new")).verdicts == "c"

    async def test_without_one_the_check_is_skipped(self, log: Log, partition: UUID) -> None:
        await log.expire()
        assert (await log.ack(partition, "a:c", lease="")).verdicts == "c"

    async def test_without_any_batch(self, log: Log, partition: UUID) -> None:
        await log.store.release("lease")
        assert (await log.ack(partition, "a:c", lease="")).verdicts == "u"
        assert (await log.ack(partition, "a:c")).verdicts == "l"

    async def test_above_the_batch(self, log: Log, partition: UUID) -> None:
        await log.store.release("lease")
        assert ids(await log.pop(batch=3)) == ["a", "b", "c"]
        row = await log.ack(partition, "c:c d:c")
        assert (row.verdicts, row.lease_released) == ("cu", True)
        assert (await state(log, partition))[0] == 2

    async def test_other_groups_leases(self, log: Log, partition: UUID) -> None:
        await log.pop(group="g", lease_id="g-lease")
        assert (await log.ack(partition, "a:c", group="g")).verdicts == "l"
        assert (await log.ack(partition, "a:c", group="g", lease="g-lease")).verdicts == "c"
        assert await log.committed(partition) == -1


class TestUnknown:
    async def test_a_group_that_never_popped(self, log: Log, partition: UUID) -> None:
        row = await log.ack(partition, "a:c b:f c:d", group="stranger")
        assert (row.verdicts, row.lease_released) == ("xxx", False)

    async def test_a_partition_that_is_not_there(self, log: Log, partition: UUID) -> None:
        assert (await log.ack(uuid4(), "a:c")).verdicts == "x"

    async def test_a_message_of_another_partition(self, log: Log, partition: UUID) -> None:
        await log.push("z", partition="other")
        await log.pop(lease_id="z-lease")
        assert (await log.ack(partition, "z:c")).verdicts == "u"

    async def test_no_targets(self, log: Log) -> None:
        assert await log.ack_targets() == []


class TestRepeatedIds:
    """With dedup off one transactionId may stand more than once in a batch."""

    @pytest.fixture
    async def repeated(self, log: Log) -> UUID:
        await log.configure(dedup_window_seconds=0)
        pushed = await log.push("a", "b", "a", "a")
        await log.pop()
        return pushed.partition_id

    @pytest.mark.parametrize(
        ("words", "verdicts", "committed"),
        [
            ("a:c", "c", 0),
            ("a:c a:c", "cc", 2),
            ("a:c b:c a:c a:c", "cccc", 3),
            ("a:c a:c a:c a:c", "cccc", 3),
            ("a:c a:f", "cf", 0),  # b between them is silent, above the completed one
            ("a:c b:c a:f a:c", "ccfw", 1),
            ("a:f a:c", "fw", -1),
            ("a:d", "d", 0),
            ("a:c b:c a:d", "ccd", 2),
        ],
    )
    async def test_the_kth_item_means_the_kth_message(
        self, log: Log, repeated: UUID, words: str, verdicts: str, committed: int
    ) -> None:
        assert (await log.ack(repeated, words)).verdicts == verdicts
        assert (await state(log, repeated))[0] == committed

    async def test_one_already_committed_is_not_meant(self, log: Log, repeated: UUID) -> None:
        assert (await log.ack(repeated, "a:c b:c")).verdicts == "cc"
        assert (await log.ack(repeated, "a:c a:c")).verdicts == "cc"
        assert (await state(log, repeated))[:2] == (3, None)


class TestBudget:
    async def fail(self, log: Log, partition: UUID, words: str = "a:f") -> str:
        row = await log.ack(partition, words)
        await log.pop()
        assert row.verdicts is not None
        return row.verdicts

    async def test_the_third_failure_dead_letters(self, log: Log, partition: UUID) -> None:
        assert [await self.fail(log, partition) for _ in range(3)] == ["f", "f", "d"]
        assert await state(log, partition) == (0, 5, None, 0)
        assert await dead_letters(log) == [(0, "a", "id-a", '"a"', "error-a", 3)]

    async def test_a_call_charges_once(self, log: Log, partition: UUID) -> None:
        await log.ack(partition, "a:f a:f b:f c:f")
        assert (await state(log, partition))[2:] == (0, 1)

    @pytest.mark.parametrize("limit", [0, 1])
    async def test_no_second_chance(self, log: Log, partition: UUID, limit: int) -> None:
        await log.configure(retry_limit=limit)
        assert await self.fail(log, partition) == "d"

    async def test_retry_is_free(self, log: Log, partition: UUID) -> None:
        for _ in range(5):
            assert await self.fail(log, partition, "a:r") == "r"
        assert (await state(log, partition))[2:] == (None, 0)

    async def test_retry_keeps_what_was_charged(self, log: Log, partition: UUID) -> None:
        words = ["a:f", "a:r", "a:f", "a:r", "a:f"]
        assert [await self.fail(log, partition, w) for w in words] == ["f", "r", "f", "r", "d"]

    async def test_each_offset_has_its_own(self, log: Log, partition: UUID) -> None:
        assert [await self.fail(log, partition) for _ in range(2)] == ["f", "f"]
        assert await self.fail(log, partition, "a:c b:f") == "cf"
        assert (await state(log, partition))[2:] == (1, 1)

    async def test_completing_it_forgets_its_failures(self, log: Log, partition: UUID) -> None:
        await self.fail(log, partition)
        await log.ack(partition, "a:c")
        assert (await state(log, partition))[2:] == (None, 0)

    @pytest.mark.parametrize(
        ("dead_letter_queue", "dlq_after_max_retries", "verdict"),
        [(True, True, "d"), (True, False, "d"), (False, True, "d"), (False, False, "z")],
    )
    async def test_with_both_flags_off_it_is_dropped(
        self,
        log: Log,
        partition: UUID,
        dead_letter_queue: bool,
        dlq_after_max_retries: bool,
        verdict: str,
    ) -> None:
        await log.configure(
            retry_limit=1,
            dead_letter_queue=dead_letter_queue,
            dlq_after_max_retries=dlq_after_max_retries,
        )
        assert await self.fail(log, partition, "a:f b:c") == f"{verdict}w"
        assert (await state(log, partition))[0] == 0
        assert len(await dead_letters(log)) == (verdict == "d")

    async def test_dlq_needs_no_flag(self, log: Log, partition: UUID) -> None:
        await log.configure(dead_letter_queue=False, dlq_after_max_retries=False)
        assert await self.fail(log, partition, "a:d") == "d"
        assert await dead_letters(log) == [(0, "a", "id-a", '"a"', "error-a", 0)]


class TestDeadLetters:
    async def test_the_payload_is_asked_for(self, log: Log, partition: UUID) -> None:
        target = Target(partition, [("a", "c"), ("b", "d")])
        [row] = await log.ack_targets(target)
        assert row[1:] == (None, False, 1, None, None, False)
        assert await state(log, partition) == (-1, 5, None, 0)
        assert await dead_letters(log) == []
        [row] = await log.ack_targets(target, letters=[letter_of(1, 1, "b")])
        assert (row.verdicts, row.needs_payload) == ("cd", None)
        assert await dead_letters(log) == [(1, "b", "id-b", '"b"', "error-b", 0)]

    async def test_an_exhausted_budget_asks_too(self, log: Log, partition: UUID) -> None:
        await log.configure(retry_limit=1)
        target = Target(partition, [("a", "f")])
        assert [r.needs_payload for r in await log.ack_targets(target)] == [0]
        assert await state(log, partition) == (-1, 5, None, 0)  # asking charges nothing

    @pytest.mark.parametrize(
        "letter",
        [
            letter_of(1, 0, "b"),  # read for another offset
            letter_of(0, 1, "a"),  # another item
            letter_of(1, 1, "b", target=2),  # another target
            {"target": 1, "item": 1, "error": "no message yet"},
        ],
    )
    async def test_a_letter_that_does_not_fit(
        self, log: Log, partition: UUID, letter: dict[str, Any]
    ) -> None:
        target = Target(partition, [("a", "c"), ("b", "d")])
        assert [r.needs_payload for r in await log.ack_targets(target, letters=[letter])] == [1]
        assert await dead_letters(log) == []

    async def test_everything_is_kept_verbatim(self, log: Log, partition: UUID) -> None:
        payload = '{"b":1, "a":[1e400,  "\\u0000\\ud83d\\ude00", ' + "[" * 500 + "]" * 500 + "]}"
        letter = letter_of(0, 0, "a") | {
            "payload": payload, "traceId": "trace", "producerSub": "me", "error": None,
            "createdAt": "2020-01-02T03:04:05.678901+00:00",
        }  # fmt: skip
        await log.ack_targets(Target(partition, [("a", "d")]), letters=[letter])
        [row] = await log.execute(
            "SELECT queue_name, partition_name, partition_id, consumer_group, payload, trace_id,"
            " producer_sub, error, created_at::text FROM queen.log_dlq"
        )
        at = "2020-01-02 03:04:05.678901+00"
        assert row == ("q", "p", partition, GROUP, payload, "trace", "me", None, at)

    async def test_dying_twice_leaves_one(self, log: Log, partition: UUID) -> None:
        assert (await log.ack(partition, "c:d")).verdicts == "d"
        await log.pop()
        assert (await log.ack(partition, "a:c b:c c:d")).verdicts == "ccd"
        assert [row[0] for row in await dead_letters(log)] == [2]
        assert (await state(log, partition))[0] == 2

    async def test_each_group_has_its_own(self, log: Log, partition: UUID) -> None:
        await log.pop(group="g")
        await log.ack(partition, "a:d")
        await log.ack(partition, "a:d", group="g")
        assert len(await dead_letters(log)) == 2


class TestManyTargets:
    async def test_they_do_not_see_each_others_errors(self, log: Log, partition: UUID) -> None:
        rows = await log.ack_targets(
            Target(partition, [("a", "c")]),
            Target(partition, [("b", "c")], lease="other"),
            Target(uuid4(), [("a", "c")]),
            Target(partition, [("b", "c"), ("x", "c")]),
        )
        assert [(r.ord, r.verdicts) for r in rows] == [(1, "c"), (2, "l"), (3, "x"), (4, "cu")]
        assert (await state(log, partition))[0] == 1

    async def test_later_ones_find_what_earlier_ones_did(self, log: Log, partition: UUID) -> None:
        rows = await log.ack_targets(
            Target(partition, [("b", "c")]),
            Target(partition, [("a", "c"), ("a", "f")]),
            Target(partition, [("c", "f")]),
            Target(partition, [("d", "c")]),
        )
        assert [r.verdicts for r in rows] == ["c", "na", "f", "l"]

    async def test_one_that_waits_for_its_payload_leaves_the_rest(
        self, log: Log, partition: UUID
    ) -> None:
        other = await log.push("z", partition="other")
        await log.pop(lease_id="z-lease")
        rows = await log.ack_targets(
            Target(partition, [("a", "d")]),
            Target(other.partition_id, [("z", "c")], lease="z-lease"),
        )
        assert [(r.verdicts, r.needs_payload) for r in rows] == [(None, 0), ("c", None)]
        assert await log.committed(other.partition_id) == 0

    async def test_a_target_of_many_items(self, log: Log) -> None:
        names = [f"m{i}" for i in range(3000)]
        pushed = await log.push(*names)
        await log.pop(batch=3000)
        row = await log.ack(pushed.partition_id, " ".join(f"{n}:c" for n in reversed(names)))
        assert row.verdicts == "c" * 3000
        assert row.lease_released


class TestMore:
    async def test_a_released_lease_tells_what_is_left(self, log: Log, partition: UUID) -> None:
        row = await log.ack(partition, "a:f")
        assert (row.queue_name, row.partition_name, row.has_more) == ("q", "p", True)

    async def test_a_finished_partition_has_no_more(self, log: Log, partition: UUID) -> None:
        row = await log.ack(partition, "f:c")
        assert not row.has_more

    async def test_a_kept_lease_tells_nothing(self, log: Log, partition: UUID) -> None:
        await log.push("g")
        assert not (await log.ack(partition, "a:c")).has_more
        row = await log.ack(partition, "f:c")
        assert (row.queue_name, row.partition_name, row.has_more) == ("q", "p", True)
