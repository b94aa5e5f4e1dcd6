"""Which message a duplicate repeats."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from queen_trio.model.ids import ZERO_UUID
from queen_trio.store import segments

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from queen_trio.store.queries import Store


class _Identified(msgspec.Struct):
    id: str


_decode = msgspec.json.Decoder(_Identified).decode


async def original_ids(
    store: Store, partition_id: UUID, positions: Sequence[int], offsets: Sequence[int]
) -> dict[int, str]:
    """Map the positions of duplicates to the message ids of their originals at `offsets`.

    An original that retention has removed gives the all-zero UUID (spec 1, "Push").
    """
    ids = {
        row.message_offset: _decode(
            segments.split(segments.decode(row.blob))[row.message_offset - row.base_offset]
        ).id
        for row in await store.segments_at(partition_id, offsets)
    }
    return {
        position: ids.get(offset, ZERO_UUID)
        for position, offset in zip(positions, offsets, strict=True)
    }
