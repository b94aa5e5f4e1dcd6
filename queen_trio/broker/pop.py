"""Pop: claim messages under a lease, or wait for some (spec 1 and 2, "Pop")."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

import trio

from queen_trio.errors import DatabaseUnavailable
from queen_trio.model.pop import Claim, ClaimedPartition, ClaimedSegment, PopRequest
from queen_trio.store.elapsed import Elapsed
from queen_trio.store.pool import SERVING_SECONDS, FirstLasts
from queen_trio.store.segments import Reader

from .outage import ride_out
from .wakeups import PopKey, Wakeups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from queen_trio.config import PopConfig
    from queen_trio.model.ids import Uuid7
    from queen_trio.store.pool import Sent
    from queen_trio.store.queries import PopRow, Store

    from .candidates import Candidates
    from .deliveries import Deliveries
    from .encryption import Encryption
    from .hints import Hints
    from .hotlist import Ring
    from .maintenance import Maintenance
    from .wakeups import Lead


# How late the answer of a parked pop may be when its last look at the database doesn't come back:
# official clients wait 5 s longer than they asked us to (spec 7).
PATIENCE_SECONDS: Final = 1.0
MAX_ROUNDS: Final = 16
# Each round after an empty one asks about so many times more candidates, up to this number.
WIDENING: Final = 4
CANDIDATES_AT_ONCE: Final = 1_000


class PopService:
    """Answers pops; parked ones hold no connection."""

    def __init__(
        self,
        store: Store,
        ids: Uuid7,
        wakeups: Wakeups,
        candidates: Candidates | None,
        hints: Hints,
        encryption: Encryption,
        maintenance: Maintenance,
        deliveries: Deliveries,
        config: PopConfig,
    ) -> None:
        self._store = store
        self._ids = ids
        self._wakeups = wakeups
        self._candidates = candidates
        self._hints = hints
        self._encryption = encryption
        self._maintenance = maintenance
        self._deliveries = deliveries
        self._config = config
        self._reader = Reader()

    async def pop(self, request: PopRequest) -> Claim | None:
        """Claim what `request` asks for; None when there is nothing (until its time-out).

        Without a time-out a database that is away is waited for, then `DatabaseUnavailable` is
        raised; with one the pop stays parked (spec 8.15). A claim is returned even if the caller
        is cancelled meanwhile: who can't deliver it owes a `release`.
        """
        arrival = trio.current_time()
        if request.timeout is None:
            if self._maintenance.pop:
                return None
            return await ride_out(lambda: self._claim(request, arrival))
        if self._wakeups.draining:
            return None
        key = PopKey(
            request.queue, request.partition, request.namespace, request.task, request.group
        )
        deadline = arrival + request.timeout
        # What autoAck takes could not be given back.
        room = 0 if request.auto_ack else _most_partitions(request)
        with self._wakeups.waiter(key, room) as waiter:
            while True:
                claim = None
                if self._maintenance.pop:  # an instant 204 would make clients spin (spec 8.14)
                    with self._wakeups.bounded(deadline):
                        await self._maintenance.wait_pops_open()
                    if trio.current_time() >= deadline or self._wakeups.draining:
                        return None
                # Cancelled after the statement was sent, a claim still comes back.
                with (
                    self._wakeups.asking(deadline + PATIENCE_SECONDS),
                    suppress(DatabaseUnavailable),
                ):
                    claim = await self._claim(request, arrival, waiter.take_lead())
                if claim is not None or self._wakeups.draining:
                    return claim
                with trio.move_on_at(deadline) as waiting:
                    await waiter.wait_woken()
                if waiting.cancelled_caught or self._wakeups.draining:
                    return None

    async def release(self, claim: Claim) -> None:
        """Give a claim back that could not be delivered, at once instead of at lease expiry.

        Does nothing for autoAck, whose cursor has moved for good. A failure is left to the expiry.
        """
        if not claim.lease_id:
            return
        try:
            await self._store.release(claim.lease_id)
        except DatabaseUnavailable:
            return
        self._hints.claims_available(
            ((part.queue, part.partition) for part in claim.partitions), claim.group
        )

    async def _claim(
        self, request: PopRequest, arrival: float, lead: Lead | None = None
    ) -> Claim | None:
        """Claim what there is; first, where a push leads to it, from behind that."""
        ring = None
        try:
            if self._candidates is not None:
                patience = _patience_seconds(request, arrival)
                ring = await self._candidates.ring_for(request, Elapsed(arrival), patience)
            if lead is not None:
                claim = await self._claim_behind(lead, ring, request, arrival)
                if claim is not None:
                    return claim
        finally:
            if lead is not None:
                lead.end()
        lease_id = self._lease_id(request)
        if ring is not None and self._candidates is not None:
            return await self._claim_from(ring, self._candidates, request, lease_id, arrival)
        rows = await self._ask(request, lease_id, arrival, None)
        return self._claim_of(request, lease_id, rows)

    def _lease_id(self, request: PopRequest) -> str:
        return "" if request.auto_ack else self._ids.take(1)[0]

    async def _claim_behind(
        self, lead: Lead, ring: Ring | None, request: PopRequest, arrival: float
    ) -> Claim | None:
        """Ask behind a push that is on its way; None when it brought nothing, or not soon."""
        lease_id = self._lease_id(request)  # of its own: should the answer be late, it is released
        try:
            if ring is None or self._candidates is None:
                rows = await self._ask(request, lease_id, arrival, None, lead.push)
                return self._claim_of(request, lease_id, rows)
            names = ring.take_these([partition for _, partition in lead.keys])
            if not names:
                return None
            return await self._claim_about(
                names, ring, self._candidates, request, lease_id, arrival, lead.push
            )
        except FirstLasts:
            self._wakeups.rest_leads()
        except DatabaseUnavailable:
            pass
        return None

    async def _claim_from(
        self,
        ring: Ring,
        candidates: Candidates,
        request: PopRequest,
        lease_id: str,
        arrival: float,
    ) -> Claim | None:
        """Ask about candidates, more in each round, until one gives something or none is left."""
        most = _most_partitions(request)
        last = False
        for _ in range(MAX_ROUNDS):
            names = ring.take(most)
            if not names and request.timeout is None and not last:
                # A pop that doesn't wait has no second chance: it looks at what is deferred, too.
                names = ring.take_deferred(most)
                last = True
            if not names:
                if ring.seeded:
                    return None
                break
            claim = await self._claim_about(names, ring, candidates, request, lease_id, arrival)
            if claim is not None:
                return claim
            # Where others have emptied many, few look-ups must find the one that is left.
            most = max(most, min(most * WIDENING, CANDIDATES_AT_ONCE))
        # So many are wrong that one look at everything is cheaper, or the ring is no guide now.
        rows = await self._ask(request, lease_id, arrival, None)
        return self._claim_of(request, lease_id, rows)

    async def _claim_about(
        self,
        names: Sequence[str],
        ring: Ring,
        candidates: Candidates,
        request: PopRequest,
        lease_id: str,
        arrival: float,
        behind: Sent | None = None,
    ) -> Claim | None:
        """Claim from candidates that were taken from the ring, and settle them there."""
        try:
            rows = await self._ask(request, lease_id, arrival, names, behind)
        except BaseException:
            candidates.requeue(ring, names)
            raise
        candidates.settle(ring, names, rows)
        claim = self._claim_of(request, lease_id, [row for row in rows if row.verdict is None])
        if claim is not None and ring.promising:
            candidates.pass_on(ring)
        return claim

    async def _ask(
        self,
        request: PopRequest,
        lease_id: str,
        arrival: float,
        names: Sequence[str] | None,
        behind: Sent | None = None,
    ) -> list[PopRow]:
        return await self._store.pop(
            request.queue,
            request.partition,
            request.namespace,
            request.task,
            request.group,
            request.batch,
            request.partitions,
            request.lease_seconds,
            request.auto_ack,
            lease_id,
            request.mode.value,
            request.since,
            Elapsed(arrival),
            self._config.max_bytes,
            names,
            patience_seconds=_patience_seconds(request, arrival),
            behind=behind,
            on_given_back=lambda rows: self._hints.claims_available(
                {(row.queue_name, row.partition_name) for row in rows}, request.group
            ),
        )

    def _claim_of(self, request: PopRequest, lease_id: str, rows: list[PopRow]) -> Claim | None:
        if not rows:
            return None
        claim = Claim(lease_id, request.group, _partitions(rows, self._reader, self._encryption))
        self._deliveries.note(claim)
        if request.auto_ack and claim.count >= request.batch:
            # No lease keeps others from the rest: whoever waits beside us may have it now.
            self._wakeups.notify(
                ((part.queue, part.partition) for part in claim.partitions), request.group
            )
        return claim


def _most_partitions(request: PopRequest) -> int:
    """How many it takes at once: each gives one message at least, a batch needs no more of them."""
    return min(request.partitions or request.batch, request.batch)


def _patience_seconds(request: PopRequest, arrival: float) -> float:
    """How long a look at the database may take: little longer than a parked pop would wait."""
    if request.timeout is None:
        return SERVING_SECONDS
    left = arrival + request.timeout - trio.current_time()
    return min(max(left, 0.0) + PATIENCE_SECONDS, SERVING_SECONDS)


def _partitions(
    rows: list[PopRow], reader: Reader, encryption: Encryption
) -> list[ClaimedPartition]:
    partitions: list[ClaimedPartition] = []
    for row in rows:
        if not partitions or partitions[-1].partition_id != row.partition_id:
            partitions.append(
                ClaimedPartition(
                    row.partition_id, row.partition_name, row.queue_name, row.delivery_attempt, []
                )
            )
        entries = reader.entries((row.partition_id, row.base_offset), row.blob)
        first = max(row.committed + 1 - row.base_offset, 0)
        stop = row.batch_end + 1 - row.base_offset
        claimed = encryption.open_entries(row.queue_name, entries[first:stop])
        partitions[-1].segments.append(ClaimedSegment(row.created_at, claimed))
    return partitions
