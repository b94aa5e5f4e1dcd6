"""Transactions: pushes and acks in one PostgreSQL transaction, all or nothing (spec 2)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

import msgspec

from queen_trio.errors import DatabaseError, DatabaseUnavailable
from queen_trio.model.transaction import Refusal, TransactionOutcome, TransactionRequest

from .hints import tell_released
from .originals import original_ids
from .outage import ride_out
from .segment import Draft, Drafted, Key
from .targets import Target, ack_arguments, results_for, sort_into_targets

if TYPE_CHECKING:
    from queen_trio.model.ack import AckResult
    from queen_trio.model.ids import Uuid7
    from queen_trio.store.queries import Store, TransactionRow

    from .encryption import Encryption
    from .hints import Hints


class _Push(msgspec.Struct):
    """A row of push_v1, as JSON."""

    ord: int
    partition_id: UUID
    duplicate_at: list[int] | None = None
    duplicate_of: list[int] | None = None


class _Ack(msgspec.Struct):
    """A row of ack_v1, as JSON."""

    ord: int
    lease_released: bool
    verdicts: str | None = None
    needs_payload: int | None = None
    queue_name: str | None = None
    partition_name: str | None = None
    has_more: bool = False


_decode_pushes = msgspec.json.Decoder(list[_Push]).decode
_decode_acks = msgspec.json.Decoder(list[_Ack]).decode


class TransactionService:
    """Runs transactions, one call each: they are not fused, their failures are their own."""

    def __init__(self, store: Store, ids: Uuid7, hints: Hints, encryption: Encryption) -> None:
        self._store = store
        self._ids = ids
        self._hints = hints
        self._encryption = encryption

    async def run(self, request: TransactionRequest) -> TransactionOutcome:
        """Commit everything or nothing.

        Rides out a short outage, then raises `DatabaseUnavailable`; an attempt whose commit was
        left unknown is recognised by its message ids and not done twice.
        """
        drafted = Drafted.from_items(request.pushes, self._ids, request.producer_sub)
        results = results_for(request.acks)
        targets = sort_into_targets(request.acks, results)
        for result in results:
            if not result.success:
                return _refused(Refusal.ACK_REJECTED, result.error)
        try:
            return await ride_out(partial(self._attempt, request, drafted, targets, results))
        except DatabaseUnavailable:
            raise
        except DatabaseError as error:
            return _refused(Refusal.DATABASE, str(error))

    async def _attempt(
        self,
        request: TransactionRequest,
        drafted: Drafted,
        targets: list[Target],
        results: list[AckResult],
    ) -> TransactionOutcome:
        drafts = list(drafted.drafts.items())
        while True:
            row = await self._encryption.agree(
                [key[0] for key, _ in drafts],
                partial(self._commit, drafts, targets, request.required_leases),
            )
            acks = _decode_acks(row.acks)
            if row.committed:
                return self._committed(drafted, targets, results, acks)
            wanted = [ack for ack in acks if ack.needs_payload is not None]
            if not wanted or row.lost_lease is not None:
                return await self._why_not(row, drafted, drafts, targets, results, acks)
            for ack in wanted:
                assert ack.needs_payload is not None  # noqa: S101 - chosen for it
                await targets[ack.ord - 1].read_letter(self._store, ack.needs_payload)

    async def _commit(
        self,
        drafts: list[tuple[Key, Draft]],
        targets: list[Target],
        required_leases: list[str],
    ) -> TransactionRow:
        encoded = [self._encryption.encode(key[0], draft.records) for key, draft in drafts]
        return await self._store.transaction(
            [key[0] for key, _ in drafts],
            [key[1] for key, _ in drafts],
            [len(draft.records) for _, draft in drafts],
            [segment.size for segment in encoded],
            [b"".join(draft.hashes) for _, draft in drafts],
            [segment.blob for segment in encoded],
            ack_arguments(targets),
            required_leases,
            [segment.sealed for segment in encoded],
        )

    def _committed(
        self,
        drafted: Drafted,
        targets: list[Target],
        results: list[AckResult],
        acks: list[_Ack],
    ) -> TransactionOutcome:
        for ack in acks:
            target = targets[ack.ord - 1]
            target.answer(ack.verdicts or "", lease_released=ack.lease_released)
            tell_released(
                self._hints, ack.queue_name, ack.partition_name, target.group, more=ack.has_more
            )
        self._hints.messages_available(drafted.drafts)
        return TransactionOutcome(drafted.finish(), results)

    async def _why_not(
        self,
        row: TransactionRow,
        drafted: Drafted,
        drafts: list[tuple[Key, Draft]],
        targets: list[Target],
        results: list[AckResult],
        acks: list[_Ack],
    ) -> TransactionOutcome:
        ours = True
        first_repeated = None
        for push in _decode_pushes(row.pushes):
            if push.duplicate_at and push.duplicate_of:
                draft = drafts[push.ord - 1][1]
                originals = await original_ids(
                    self._store, push.partition_id, push.duplicate_at, push.duplicate_of
                )
                for position, original in originals.items():
                    result = draft.results[position]
                    ours = ours and original == result.message_id
                    first_repeated = first_repeated or result.transaction_id
        if first_repeated is not None:
            if ours:  # an earlier attempt of this very transaction has committed after all
                return TransactionOutcome(drafted.finish(), results)
            return _refused(
                Refusal.DUPLICATE, f"QDUP: transactionId {first_repeated} is already in its queue"
            )
        if row.lost_lease is not None:
            return _refused(
                Refusal.ACK_REJECTED, f"invalid or expired lease: {row.lost_lease} is required"
            )
        for ack in acks:
            targets[ack.ord - 1].answer(ack.verdicts or "", lease_released=False)
        for answer in results:
            if answer.noop:
                return _refused(Refusal.ACK_REJECTED, f"already committed: {answer.transactionId}")
            if not answer.success:
                return _refused(Refusal.ACK_REJECTED, answer.error)
        return _refused(Refusal.DATABASE, "the transaction was not committed")


def _refused(refusal: Refusal, error: str | None) -> TransactionOutcome:
    return TransactionOutcome(refusal=refusal, error=error)
