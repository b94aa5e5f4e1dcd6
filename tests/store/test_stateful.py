"""A machine of pushes, pops, acks, expiries and deletes against a model of fifty lines (spec 6).

The model knows only lists and integers. Whatever order of calls hypothesis finds, the database must
deliver what the model says, and its cursors must stand where the model's do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import field, mutable
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from tests.store.calls import Direct, Log, Part, now

if TYPE_CHECKING:
    from uuid import UUID

    import pytest

PARTITIONS = ("p0", "p1", "p2")
GROUPS = ("g", "h")
RETRY_LIMIT = 3

partitions = st.sampled_from(PARTITIONS)
groups = st.sampled_from(GROUPS)
# A few names, so that duplicates happen.
transaction_ids = st.integers(0, 60).map(lambda n: f"t{n}")


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
    cursors: dict[str, Cursor] = field(factory=dict)
    dead: set[tuple[str, int]] = field(factory=set)


class Deliveries(RuleBasedStateMachine):
    direct: Direct  # set by the test: one database for all runs, a queue for each
    runs = 0

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        type(self).runs += 1
        self.queue = f"run{self.runs}"
        self.log = Log(self.direct)
        self.model: dict[str, Partition] = {}
        self.ids: dict[str, UUID] = {}
        self.claimed = 0
        self.begin()

    def begin(self) -> None:
        """Make the queue, and its partitions with ids in order: replays pop the same way."""
        now(self.log.configure(self.queue, retry_limit=RETRY_LIMIT))
        for number, name in enumerate(PARTITIONS):
            now(
                self.log.execute(
                    "INSERT INTO queen.log_partitions (id, queue_id, name)"
                    " SELECT overlay(q.id::text PLACING $2 FROM 1 FOR 1)::uuid, q.id, $3"
                    " FROM queen.queues q WHERE q.name = $1",
                    self.queue,
                    str(number),
                    name,
                )
            )

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
            part = self.model.setdefault(name, Partition())
            self.ids[name] = row.partition_id
            repeated = [i for i, n in enumerate(names) if n in part.names]
            if repeated:
                assert row.base_offset is None
                assert row.duplicate_at == repeated
                assert row.duplicate_of == [part.names.index(names[i]) for i in repeated]
            else:
                assert row.base_offset == len(part.names)
                part.names += names

    # -- popping ---------------------------------------------------------------------------

    @rule(
        target=leases,
        group=groups,
        partition=st.none() | partitions,
        batch=st.integers(1, 6),
        cap=st.sampled_from([1, 2, None]),
        auto_ack=st.booleans(),
    )
    def pop(
        self, group: str, partition: str | None, batch: int, cap: int | None, auto_ack: bool
    ) -> tuple[str, str]:
        self.claimed += 1
        lease = "" if auto_ack else f"{self.queue}-{self.claimed}"
        rows = now(
            self.log.pop(
                queue=self.queue, partition=partition, group=group, batch=batch, partitions=cap,
                auto_ack=auto_ack, lease_id=lease,
            )
        )  # fmt: skip
        taken: dict[str, list[Any]] = {}
        for message in rows:
            taken.setdefault(message.partition, []).append(message)
        left = batch
        for name, messages in taken.items():
            part = self.model[name]
            cursor = part.cursors.setdefault(group, Cursor(committed=part.start - 1))
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
                    pending = max(there.committed + 1, part.start) < len(part.names)
                    assert there.live or not pending
        return group, lease

    # -- answering -------------------------------------------------------------------------

    @rule(
        claim=leases,
        partition=partitions,
        picks=st.lists(
            st.tuples(st.integers(0, 7), st.sampled_from("cccfrd")), min_size=1, max_size=4
        ),
    )
    def ack(self, claim: tuple[str, str], partition: str, picks: list[tuple[int, str]]) -> None:
        group, lease = claim
        part = self.model.get(partition)
        if part is None or not part.names:
            return
        cursor = part.cursors.get(group)
        base = max(cursor.committed - 1, 0) if cursor else 0
        items = [(min(base + n, len(part.names) - 1), letter) for n, letter in picks]
        words = " ".join(f"{part.names[offset]}:{letter}" for offset, letter in items)
        row = now(self.log.ack(self.ids[partition], words, group=group, lease=lease))
        verdicts, released = self.expect(part, group, cursor, lease, items)
        assert (row.verdicts, row.lease_released) == (verdicts, released)

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

    @rule(partition=partitions, share=st.floats(0, 1))
    def retain(self, partition: str, share: float) -> None:
        """Drop whole segments from the start, read or not."""
        if partition not in self.ids:
            return
        part = self.model[partition]
        bases = now(
            self.log.execute(
                "SELECT base_offset FROM queen.log_segments WHERE partition_id = $1 ORDER BY 1",
                self.ids[partition],
            )
        )
        starts = [base for (base,) in bases] + [len(part.names)]
        part.start = starts[int(share * (len(starts) - 1))]
        now(self.log.retain_from(self.ids[partition], part.start))

    @precondition(lambda self: self.model)
    @rule(really=st.integers(0, 5))
    def delete(self, really: int) -> None:
        if really:
            return
        assert now(self.log.store.delete_queue(self.queue)) is True
        self.model.clear()
        self.ids.clear()
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
                "SELECT p.name, s.base_offset, s.end_offset FROM queen.log_partitions p"
                " JOIN queen.queues q ON q.id = p.queue_id"
                " JOIN queen.log_segments s ON s.partition_id = p.id"
                " WHERE q.name = $1 ORDER BY s.base_offset",
                self.queue,
            )
        )
        for name, part in self.model.items():
            offsets = [o for n, first, last in rows if n == name for o in range(first, last + 1)]
            assert offsets == list(range(part.start, len(part.names)))


def test_deliveries(direct: Direct, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Deliveries, "direct", direct, raising=False)
    case = Deliveries.TestCase()
    case.settings = settings(  # type: ignore[misc]  # hypothesis documents it so
        max_examples=150,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    case.runTest()
