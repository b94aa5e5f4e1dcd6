"""Pushes that can't be committed now: into the disk spool (spec 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from queen_trio.spool import SpoolRecord

from .encryption import EncryptionKeyMissing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from queen_trio.spool import Spool

    from .encryption import Encryption
    from .segment import Draft, Segment


class PushBuffer:
    """Answers drafts from the spool."""

    def __init__(self, spool: Spool, encryption: Encryption) -> None:
        self._spool = spool
        self._encryption = encryption

    async def take(self, segments: Sequence[Segment], why: str) -> None:
        """Settle all drafts: `buffered` once they are on the disk, `failed` where they can't be.

        `why` they are here begins the error of the latter.
        """
        drafts: list[Draft] = []
        records: list[SpoolRecord] = []
        for segment in segments:
            queue, partition = segment.key
            for draft in segment.drafts:
                try:
                    sealed = self._encryption.seal_for_disk(queue, draft.records)
                except EncryptionKeyMissing as error:
                    draft.fail(f"{why}, and it can't be spooled: {error}")
                    continue
                drafts.append(draft)
                records.append(SpoolRecord(queue, partition, tuple(sealed)))
            if self._encryption.has_key:  # 7 µs a message: let others run between segments
                await trio.lowlevel.checkpoint()
        if not drafts:
            return
        refusals = await self._spool.append(records)
        for draft, refusal in zip(drafts, refusals, strict=True):
            if refusal is None:
                draft.buffer()
            else:
                draft.fail(f"{why}, and {refusal}")
