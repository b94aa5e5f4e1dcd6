"""A machine of all that changes a log against a small model of it (spec 6).

Pushes, pops, acks, transactions, expiries, seeks, retention, replays of dead letters, deletes.

The model knows only lists and integers. Whatever order of calls hypothesis finds, the database must
deliver what the model says, and its cursors must stand where the model's do.
"""

from __future__ import annotations

import json
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from attrs import field, mutable
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from queen_trio.model.message import hash_of
from queen_trio.store import segments
from queen_trio.store.dlq import DeadLetterStore
from queen_trio.store.groups import GroupStore
from tests.store.calls import Direct, Log, Part, Target, ack_arguments, letter_of, now, record

if TYPE_CHECKING:
    from uuid import UUID

    import pytest

PARTITIONS = ("p0", "p1", "p2")
# The last one subscribes to what comes after its first pop.
GROUPS = ("g", "h", "new")
RETRY_LIMIT = 3

# Time moves in steps of 100 s, so that no age is near a limit.
STEP_SECONDS = 100
OPTIONS: dict[str, Any] = {
    "retry_limit": RETRY_LIMIT, "dedup_window_seconds": 10**8, "max_wait_time_seconds": 250,
    "retention_enabled": True, "completed_retention_seconds": 150,
}  # fmt: skip

partitions = st.sampled_from(PARTITIONS)
groups = st.sampled_from(GROUPS)
# A few names, so that duplicates happen.
transaction_ids = st.integers(0, 150).map(lambda n: f"t{n}")
# What an ack is about, counted from the first message that its cursor has not passed.
near = st.sampled_from([0, 1, 2, 3, 0, 1, -1, 6])


@mutable
class Cursor:
    """A group's progress in a partition, as spec 2 tells it."""

    committed: int = -1
    batch_end: int | None = None
    lease: str | None = None
    live: bool = False
    claims: int = 0
    failed_at: int | None = None
    failures: int = 0

    def release(self) -> None:
        self.batch_end = self.lease = None
        self.live = False

    def commit(self, offset: int) -> None:
        """Move to `offset`; all that was at or below it is forgotten."""
        self.committed = max(self.committed, offset)
        if self.batch_end is not None and self.committed >= self.batch_end:
            self.claims = 0
        if self.failed_at is not None and self.committed >= self.failed_at:
            self.failed_at, self.failures = None, 0


@mutable
class Partition:
    """All that was ever stored, by offset."""

    names: list[str] = field(factory=list)
    start: int = 0
    ends: list[tuple[int, int]] = field(factory=list)  # last offset of each segment, and when
    cursors: dict[str, Cursor] = field(factory=dict)
    dead: set[tuple[str, int]] = field(factory=set)

    def append(self, names: list[str], clock: int) -> None:
        self.names += names
        self.ends.append((len(self.names) - 1, clock))

    def trim(self, most: int, clock: int) -> tuple[int, int]:
        """Apply retention; returns how many segments and messages go."""
        passed = min((cursor.committed for cursor in self.cursors.values()), default=-1)
        there = [(end, clock - at) for end, at in self.ends if end >= self.start][:most]
        gone = [end for end, age in there if age > 250 or (age > 150 and end <= passed)]
        before = self.start
        self.start = max([self.start, *(end + 1 for end in gone)])
        return len(gone), self.start - before


class Deliveries(RuleBasedStateMachine):
    direct: Direct  # set by the test: one database for all runs, a queue for each
    runs = 0

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        type(self).runs += 1
        self.queue = f"run{self.runs}"
        self.log = Log(self.direct)
        self.points: dict[str, dict[str, int]] = {}  # of each subscribed group, by partition
        self.claimed = 0
        self.clock = 0
        self.begin()

    def begin(self) -> None:
        """Make the queue with something in it.

        Its partitions have ids in order, so that replays pop the same way.
        """
        now(self.log.configure(self.queue, **OPTIONS))
        self.model = {name: Partition() for name in PARTITIONS}
        self.ids: dict[str, UUID] = {}
        for number, name in enumerate(PARTITIONS):
            [(self.ids[name],)] = now(
                self.log.execute(
                    "INSERT INTO queen.log_partitions (id, queue_id, name)"
                    " SELECT overlay(q.id::text PLACING $2 FROM 1 FOR 1)::uuid, q.id, $3"
                    " FROM queen.queues q WHERE q.name = $1 RETURNING id",
                    self.queue,
                    str(number),
                    name,
                )
            )
        for n in range(2):
            self.push({name: [f"{name}-{n}-{i}" for i in range(3)] for name in PARTITIONS})

    # -- pushing ---------------------------------------------------------------------------

    @rule(
        parts=st.dictionaries(
            partitions, st.lists(transaction_ids, min_size=1, max_size=4, unique=True), min_size=1
        )
    )
    def push(self, parts: dict[str, list[str]]) -> None:
        rows = now(
            self.log.push_bundle(
                *(Part(ids=n, queue=self.queue, partition=p) for p, n in parts.items())
            )
        )
        for (name, names), row in zip(parts.items(), rows, strict=True):
            part = self.model[name]
            assert row.partition_id == self.ids[name]
            repeated = [i for i, n in enumerate(names) if n in part.names]
            if repeated:
                assert row.base_offset is None
                assert row.duplicate_at == repeated
                assert row.duplicate_of == [part.names.index(names[i]) for i in repeated]
            else:
                assert row.base_offset == len(part.names)
                part.append(names, self.clock)

    # -- popping ---------------------------------------------------------------------------

    @rule(
        target=leases,
        group=groups,
        partition=st.none() | partitions,
        batch=st.integers(1, 6),
        cap=st.sampled_from([1, 2, None]),
        auto_ack=st.sampled_from([False, False, False, True]),
    )
    def pop(
        self, group: str, partition: str | None, batch: int, cap: int | None, auto_ack: bool
    ) -> tuple[str, str]:
        self.claimed += 1
        lease = "" if auto_ack else f"{self.queue}-{self.claimed}"
        if group not in self.points:
            here = {name: len(part.names) for name, part in self.model.items()}
            self.points[group] = here if group == "new" else {}
        rows = now(
            self.log.pop(
                queue=self.queue, partition=partition, group=group, batch=batch, partitions=cap,
                auto_ack=auto_ack, lease_id=lease, mode="new" if group == "new" else "all",
            )
        )  # fmt: skip
        taken: dict[str, list[Any]] = {}
        for message in rows:
            taken.setdefault(message.partition, []).append(message)
        left = batch
        for name, messages in taken.items():
            part = self.model[name]
            cursor = part.cursors.setdefault(group, Cursor(self.next_offset(group, name) - 1))
            assert not cursor.live
            first = max(cursor.committed + 1, part.start)
            last = min(len(part.names), first + left) - 1
            assert [m.offset for m in messages] == list(range(first, last + 1))
            assert [m.id for m in messages] == part.names[first : last + 1]
            assert {m.attempt for m in messages} == {cursor.claims + 1}
            left -= len(messages)
            cursor.claims += 1
            cursor.committed = first - 1  # past what retention deleted
            cursor.batch_end, cursor.lease, cursor.live = last, lease, True
            if auto_ack:
                cursor.commit(last)
                cursor.release()
                cursor.failed_at, cursor.failures = None, 0
        # Nothing that could have been taken was left.
        if left and (cap is None or len(taken) < cap):
            for name, part in self.model.items():
                if partition in (None, name) and name not in taken:
                    there = part.cursors.get(group, Cursor())
                    assert there.live or self.next_offset(group, name) >= len(part.names)
        return group, lease

    def next_offset(self, group: str, name: str) -> int:
        """What a subscribed group gets next from a partition, cursor or not."""
        part = self.model[name]
        if group in part.cursors:
            return max(part.cursors[group].committed + 1, part.start)
        return max(self.points[group].get(name, 0), part.start)

    # -- answering -------------------------------------------------------------------------

    def live(self) -> list[tuple[str, str, str]]:
        """Partition, group and lease of what is being worked on."""
        return [
            (name, group, cursor.lease)
            for name, part in self.model.items()
            for group, cursor in part.cursors.items()
            if cursor.live and cursor.lease
        ]

    @precondition(lambda self: self.live())
    @rule(
        nth=st.integers(0, 8),
        picks=st.lists(st.tuples(near, st.sampled_from("ccccfrd")), min_size=1, max_size=4),
    )
    def ack(self, nth: int, picks: list[tuple[int, str]]) -> None:
        live = self.live()
        self.check_ack(*live[nth % len(live)], picks)

    @rule(
        claim=leases,
        partition=partitions,
        picks=st.lists(st.tuples(near, st.sampled_from("cfrd")), min_size=1, max_size=3),
    )
    def ack_anything(
        self, claim: tuple[str, str], partition: str, picks: list[tuple[int, str]]
    ) -> None:
        """Leases that are over, or never were of this partition; after autoAck, no lease."""
        if self.model[partition].names:
            self.check_ack(partition, *claim, picks)

    def check_ack(
        self, partition: str, group: str, lease: str, picks: list[tuple[int, str]]
    ) -> None:
        part = self.model[partition]
        cursor = part.cursors.get(group)
        items = self.items(part, cursor, picks)
        words = " ".join(f"{part.names[offset]}:{letter}" for offset, letter in items)
        row = now(self.log.ack(self.ids[partition], words, group=group, lease=lease))
        verdicts, released = self.expect(part, group, cursor, lease, items)
        assert (row.verdicts, row.lease_released) == (verdicts, released)

    def items(
        self, part: Partition, cursor: Cursor | None, picks: list[tuple[int, str]]
    ) -> list[tuple[int, str]]:
        """Offsets around the cursor, each with a letter."""
        base = cursor.committed + 1 if cursor else 0
        last = len(part.names) - 1
        return [(min(max(base + n, 0), last), letter) for n, letter in picks]

    @precondition(lambda self: self.live())
    @rule(
        nth=st.integers(0, 8),
        picks=st.lists(
            st.tuples(st.integers(0, 2), st.sampled_from("cccccfd")), min_size=1, max_size=2
        ),
        to=partitions,
        names=st.lists(transaction_ids, min_size=1, max_size=2, unique=True),
    )
    def transact(self, nth: int, picks: list[tuple[int, str]], to: str, names: list[str]) -> None:
        """Ack and push, both or neither."""
        live = self.live()
        partition, group, lease = live[nth % len(live)]
        part = self.model[partition]
        items = self.items(part, part.cursors[group], picks)
        trial = deepcopy(part)
        verdicts, _ = self.expect(trial, group, trial.cursors.get(group), lease, items)
        repeated = set(names) & set(self.model[to].names)
        committed = self.commit(
            Target(
                self.ids[partition],
                [(part.names[o], s) for o, s in items],
                group=group,
                lease=lease,
            ),
            to,
            names,
        )
        assert committed == (not repeated and set(verdicts) <= set("cfrd"))
        if committed:
            self.model[partition] = trial
            self.model[to].append(names, self.clock)

    def commit(self, acks: Target, to: str, names: list[str]) -> bool:
        """Run one transaction, reading dead letters as needed."""
        letters: list[dict[str, Any]] = []
        while True:
            blob, size = segments.encode([record(name) for name in names])
            hashes = b"".join(map(hash_of, names))
            row = now(
                self.log.store.transaction(
                    [self.queue], [to], [len(names)], [size], [hashes], [blob],
                    ack_arguments([acks], letters), [],
                )
            )  # fmt: skip
            needs = [ack["needs_payload"] for ack in json.loads(row.acks)]
            if row.committed or needs in ([], [None]):
                return bool(row.committed)
            letters = [letter_of(i, needs[0], name) for i, (name, _) in enumerate(acks.items)]

    def expect(
        self,
        part: Partition,
        group: str,
        cursor: Cursor | None,
        lease: str,
        items: list[tuple[int, str]],
    ) -> tuple[str, bool]:
        """Apply an ack to the model; returns its verdicts and whether the lease ended."""
        if cursor is None:
            return "x" * len(items), False
        late = {i: "n" if s == "c" else "a" for i, (o, s) in enumerate(items)
                if o <= cursor.committed}  # fmt: skip
        if lease and (cursor.lease != lease or not cursor.live):
            return "".join(late.get(i, "l") for i in range(len(items))), False
        end = -1 if cursor.batch_end is None else cursor.batch_end
        inside = {i: item for i, item in enumerate(items) if cursor.committed < item[0] <= end}
        done = max((o for o, s in inside.values() if s == "c"), default=cursor.committed)
        stop = min((o for o, s in inside.values() if s != "c"), default=None)
        why = min((s for o, s in inside.values() if o == stop and s != "c"), default=None)
        until = done if stop is None else max(cursor.committed, min(done, stop - 1))
        dead = why == "d"
        if why == "f":
            cursor.failures = cursor.failures + 1 if cursor.failed_at == stop else 1
            cursor.failed_at = stop
            dead = cursor.failures >= RETRY_LIMIT
        if dead and stop is not None:
            part.dead.add((group, stop))
            if until == stop - 1:
                until = stop
        verdicts = ""
        for i, (o, s) in enumerate(items):
            if i not in inside:
                verdicts += late.get(i, "u")
            elif o == stop and s == why and dead:
                verdicts += "d"
            elif s != "c":
                verdicts += "w" if s == "d" else s
            else:
                verdicts += "c" if o <= until else "w"
        released = bool(inside) and (stop is not None or until >= end)
        if stop is not None or until > cursor.committed:
            cursor.commit(until)
        if released:
            cursor.release()
        return verdicts, released

    # -- what else happens to leases -------------------------------------------------------

    @rule(claim=leases)
    def expire(self, claim: tuple[str, str]) -> None:
        _, lease = claim
        now(self.log.expire(lease))
        for cursor in self.holding(lease):
            cursor.live = False

    @rule(claim=leases)
    def release(self, claim: tuple[str, str]) -> None:
        _, lease = claim
        held = self.holding(lease)
        assert now(self.log.store.release(lease)) == len(held)
        for cursor in held:
            cursor.release()
            cursor.claims -= 1

    @rule(claim=leases)
    def extend(self, claim: tuple[str, str]) -> None:
        _, lease = claim
        renewed, _ = now(self.log.store.extend(lease, 100))
        assert renewed == len([cursor for cursor in self.holding(lease) if cursor.live])

    def holding(self, lease: str) -> list[Cursor]:
        return [
            cursor
            for part in self.model.values()
            for cursor in part.cursors.values()
            if lease and cursor.lease == lease
        ]

    # -- deleting --------------------------------------------------------------------------

    @rule(steps=st.integers(1, 2))
    def age(self, steps: int) -> None:
        """Let time pass, for messages and for subscriptions."""
        self.clock += steps * STEP_SECONDS
        now(self.log.age(steps * STEP_SECONDS, queue=self.queue))
        now(
            self.log.execute(
                "UPDATE queen.consumer_groups_metadata SET subscription_timestamp ="
                " subscription_timestamp - make_interval(secs => $2) WHERE queue_name = $1",
                self.queue,
                steps * STEP_SECONDS,
            )
        )

    @rule(partition=partitions, most=st.integers(1, 4))
    def trim(self, partition: str, most: int) -> None:
        """A step of retention, by both rules."""
        gone = self.model[partition].trim(most, self.clock)
        assert now(self.log.trim(self.ids[partition], most)) == gone

    # -- moving and burying ----------------------------------------------------------------

    @rule(group=groups, partition=st.none() | partitions, to_end=st.booleans())
    def seek(self, group: str, partition: str | None, to_end: bool) -> None:
        store = GroupStore(self.log.store)
        moved = now(store.seek(group, self.queue, partition, to_end=to_end, since=None))
        if group not in self.points:
            assert moved is None
            return
        names = PARTITIONS if partition is None else (partition,)
        assert moved == len(names)
        for name in names:
            part = self.model[name]
            part.cursors[group] = Cursor((len(part.names) if to_end else part.start) - 1)

    def forget(self, group: str, metadata: bool) -> None:
        """Delete a group; with its subscription, or so that it starts there again."""
        deleted = now(GroupStore(self.log.store).delete(group, self.queue, metadata=metadata))
        cursors = [part.cursors.pop(group, None) for part in self.model.values()]
        assert deleted.cursors == sum(cursor is not None for cursor in cursors)
        if metadata:
            assert deleted.subscriptions == (group in self.points)
            self.points.pop(group, None)

    @precondition(lambda self: any(part.dead for part in self.model.values()))
    @rule(nth=st.integers(0, 8))
    def replay(self, nth: int) -> None:
        """Move a dead letter back to the end of its partition."""
        dead = sorted((name, *letter) for name, part in self.model.items() for letter in part.dead)
        partition, group, offset = dead[nth % len(dead)]
        part = self.model[partition]
        [(letter,)] = now(
            self.log.execute(
                "SELECT id FROM queen.log_dlq WHERE partition_id = $1 AND consumer_group = $2"
                ' AND "offset" = $3',
                self.ids[partition], group, offset,
            )
        )  # fmt: skip
        name = f"{group}-{offset}"
        blob, size = segments.encode([record(name)])
        store = DeadLetterStore(self.log.store.pool, self.log.store.tenant)
        row = now(store.replay(letter, self.queue, partition, hash_of(name), size, blob))
        part.dead.remove((group, offset))
        if name in part.names:
            assert (row.verdict, row.message_offset) == ("duplicate", part.names.index(name))
        else:
            assert (row.verdict, row.message_offset) == ("moved", len(part.names))
            part.append([name], self.clock)

    # Not so often that nothing lives long enough.
    @precondition(lambda self: self.claimed % 4 == 3)
    @rule(
        # Rarely the queue: what a run has built up goes with it.
        what=st.sampled_from(["queue", *GROUPS, *GROUPS, *GROUPS]),
        metadata=st.booleans(),
    )
    def delete(self, what: str, metadata: bool) -> None:
        if what != "queue":
            self.forget(what, metadata)
            return
        assert now(self.log.store.delete_queue(self.queue)) is True
        self.points.clear()
        self.begin()

    # -- what always holds -----------------------------------------------------------------

    @invariant()
    def cursors_stand_where_the_models_do(self) -> None:
        rows = now(
            self.log.execute(
                "SELECT p.name, c.consumer_group, c.committed, c.batch_end, c.batch_retry_count,"
                " c.attempt_offset, c.attempt_count, c.lease_expires_at > clock_timestamp()"
                " FROM queen.log_consumers c JOIN queen.log_partitions p ON p.id = c.partition_id"
                " JOIN queen.queues q ON q.id = p.queue_id WHERE q.name = $1",
                self.queue,
            )
        )
        assert {row[:2]: (*row[2:-1], bool(row[-1])) for row in rows} == {
            (name, group): (
                c.committed, c.batch_end, c.claims, c.failed_at, c.failures, c.live
            )
            for name, part in self.model.items()
            for group, c in part.cursors.items()
        }  # fmt: skip

    @invariant()
    def the_dead_are_those_of_the_model(self) -> None:
        rows = now(
            self.log.execute(
                'SELECT partition_name, consumer_group, "offset", transaction_id'
                " FROM queen.log_dlq WHERE queue_name = $1",
                self.queue,
            )
        )
        assert set(rows) == {
            (name, group, offset, part.names[offset])
            for name, part in self.model.items()
            for group, offset in part.dead
        }

    @invariant()
    def what_is_stored_is_dense(self) -> None:
        rows = now(
            self.log.execute(
                "SELECT p.name, p.log_start, p.last_offset,"
                " p.oldest_live_at IS NOT DISTINCT FROM min(s.created_at),"
                " coalesce(array_agg(s.end_offset ORDER BY s.base_offset)"
                "          FILTER (WHERE s.base_offset IS NOT NULL), '{}')"
                " FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id"
                " LEFT JOIN queen.log_segments s ON s.partition_id = p.id"
                " WHERE q.name = $1 GROUP BY p.id",
                self.queue,
            )
        )
        for name, log_start, last_offset, oldest_is_right, ends in rows:
            part = self.model[name]
            assert (log_start, last_offset) == (part.start, len(part.names) - 1)
            assert oldest_is_right
            assert ends == [end for end, _ in part.ends if end >= part.start]

    @invariant()
    def every_group_owes_what_it_has_not_got(self) -> None:
        rows = now(GroupStore(self.log.store).groups_of(self.queue))
        assert {row.group: row.total_lag for row in rows} == {
            group: sum(
                len(part.names) - self.next_offset(group, name) for name, part in self.model.items()
            )
            for group in self.points
        }


def test_deliveries(direct: Direct, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Deliveries, "direct", direct, raising=False)
    case = Deliveries.TestCase()
    case.settings = settings(  # type: ignore[misc]  # hypothesis documents it so
        max_examples=100,
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    case.runTest()
