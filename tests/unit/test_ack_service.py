"""AckService over a real PostgreSQL: what one attempt has decided the next leaves alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from queen_trio.broker.ack import open_ack_service
from queen_trio.broker.deliveries import Deliveries
from queen_trio.broker.encryption import Encryption
from queen_trio.broker.hints import FanOut
from queen_trio.errors import DatabaseUnavailable
from queen_trio.model.ack import Ack, AckStatus
from queen_trio.model.message import hash_of
from queen_trio.store.queries import NOTHING_VERIFIED, Store

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from queen_trio.store.pool import Pool


class FlickeringStore(Store):
    """The real store, away the first time that a dead letter's message is read."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self.reads = 0

    async def segments_at(self, partition_id: UUID, offsets: Sequence[int]) -> list[Any]:
        self.reads += 1
        if self.reads == 1:
            raise DatabaseUnavailable("away")
        return await super().segments_at(partition_id, offsets)


async def claim(store: Store, partition: str) -> UUID:
    """Push the message `m` and claim it under the lease `lease`."""
    record = b'{"id":"m","transactionId":"m","traceId":null,"data":1,"producerSub":null}'
    encoded = Encryption(store, None).encode("q", [record])
    [pushed] = await store.push(
        ["q"], [partition], [1], [encoded.size], [hash_of("m")], [encoded.blob],
        [NOTHING_VERIFIED], [None], [None], [False],
    )  # fmt: skip
    await store.pop("q", partition, "", "", "g", 1, 1, 60, False, "lease", "all", None, 0, 2**20)
    return pushed.partition_id


async def test_what_is_decided_is_not_sent_again_when_a_letter_cannot_be_read(pool: Pool) -> None:
    """A failure sent twice would be refused, for its lease is over; without one, charged twice."""
    store = FlickeringStore(pool)
    retried, dead = await claim(store, "a"), await claim(store, "b")
    with trio.fail_after(30):
        async with open_ack_service(store, FanOut([]), Deliveries()) as acks:
            first, second = await acks.ack(
                [
                    Ack(["m"], retried, "g", AckStatus.FAILED, "lease"),
                    Ack(["m"], dead, "g", AckStatus.DEAD_LETTER, "lease"),
                ]
            )
    assert store.reads == 2
    assert (first.success, first.error) == (True, None)
    assert second.dlq
