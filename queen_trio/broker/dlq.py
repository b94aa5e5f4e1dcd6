"""Dead letters: list, move back, delete, and file by hand (spec 2, "Messages, DLQ, traces")."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from queen_trio.errors import ClientError
from queen_trio.model.inspection import DeadLetterFilter, Filing, Page, Replay, ReplayVerdict
from queen_trio.model.message import PushItem, hash_of
from queen_trio.store import segments

from .originals import original_ids
from .outage import ride_out
from .segment import Draft, Drafted, Key
from .targets import letter_of

if TYPE_CHECKING:
    from uuid import UUID

    from queen_trio.model.ids import Uuid7
    from queen_trio.store.dlq import DeadLetterRow, DeadLetterStore, ReplayRow
    from queen_trio.store.messages import MessageStore
    from queen_trio.store.queries import Store

    from .encryption import Encryption
    from .hints import Hints

# Bounds how long one call of a purge holds its locks.
PURGE_ROWS: Final = 1_000


class DeadLetterService:
    """Works on dead letters; every method waits out a short outage of the database."""

    def __init__(
        self,
        letters: DeadLetterStore,
        messages: MessageStore,
        store: Store,
        ids: Uuid7,
        hints: Hints,
        encryption: Encryption,
        max_bytes: int,
    ) -> None:
        """`max_bytes` bounds an answer, as it does a pop's (spec 8.11)."""
        self._letters = letters
        self._messages = messages
        self._store = store
        self._ids = ids
        self._hints = hints
        self._encryption = encryption
        self._max_bytes = max_bytes

    async def read_page(
        self, which: DeadLetterFilter, page: Page
    ) -> tuple[list[DeadLetterRow], int]:
        """Read a page, newest first, and count all that match.

        The page may end early where it would grow large.
        """
        rows = await ride_out(partial(self._letters.read_page, which, page, self._max_bytes))
        opened = [self._encryption.open_letter(row) for row in rows]
        return opened, await ride_out(partial(self._letters.count, which))

    async def replay(self, row_id: UUID) -> Replay | None:
        """Move one back into its queue, in one transaction; None when there is none."""
        letter = await ride_out(partial(self._letters.read, row_id))
        return None if letter is None else await self._move(letter)

    async def retry(
        self, partition_id: UUID, transaction_id: str, group: str | None
    ) -> Replay | None:
        """Move the newest dead letter of a message (and group) back; None when there is none."""
        letters = await ride_out(
            partial(self._letters.of_message, partition_id, transaction_id, group)
        )
        return await self._move(letters[0]) if letters else None

    async def file(
        self, partition_id: UUID, transaction_id: str, group: str, error: str | None
    ) -> Filing:
        """Dead-letter a message by hand, for one group, if its cursor can step over it."""
        found = await ride_out(partial(self._messages.find, partition_id, hash_of(transaction_id)))
        if found is None:
            return Filing.MISSING
        records = segments.split(segments.decode(found.blob))
        letter = letter_of(records[found.message_offset - found.base_offset], found.created_at)
        encoded = msgspec.json.encode(letter | {"error": error}).decode()
        return Filing(
            await ride_out(
                partial(self._letters.file, partition_id, group, found.message_offset, encoded)
            )
        )

    async def delete(self, partition_id: UUID, transaction_id: str, group: str | None) -> int:
        """Delete the dead letters of a message; returns how many there were."""
        return await ride_out(partial(self._letters.delete, partition_id, transaction_id, group))

    async def purge(self, which: DeadLetterFilter) -> int:
        """Delete all that match, in many small transactions; returns how many."""
        deleted = 0
        while True:
            count = await ride_out(partial(self._letters.purge, which, PURGE_ROWS))
            deleted += count
            if count < PURGE_ROWS:
                return deleted

    async def _move(self, letter: DeadLetterRow) -> Replay | None:
        """Push what the letter holds and delete it, in one transaction.

        An attempt whose commit was left unknown is recognised by its message id.
        """
        letter = self._encryption.open_letter(letter)
        if letter.decryption_error is not None:
            raise ClientError(
                f"the dead letter {letter.id} can't be opened: {letter.decryption_error}",
                status=409,
                code="undecipherable",
            )
        drafted = Drafted.from_items(
            [
                PushItem(
                    letter.queue_name,
                    msgspec.Raw(letter.payload.encode()),
                    letter.partition_name,
                    f"dlq:{letter.id}",
                    letter.trace_id,
                )
            ],
            self._ids,
            letter.producer_sub,
        )
        [(key, draft)] = drafted.drafts.items()
        row = await ride_out(
            partial(self._encryption.agree, [key[0]], partial(self._replay, letter.id, key, draft))
        )
        verdict = ReplayVerdict(row.verdict)
        if row.partition_id is None or row.message_offset is None:
            return None
        [result] = drafted.results
        message_id = result.message_id
        if verdict is ReplayVerdict.DUPLICATE:
            originals = await ride_out(
                partial(original_ids, self._store, row.partition_id, [0], [row.message_offset])
            )
            if originals[0] == message_id:
                verdict = ReplayVerdict.MOVED
            message_id = originals[0]
        if verdict is ReplayVerdict.MOVED:
            self._hints.messages_available([key])
        return Replay(
            verdict, *key, row.partition_id, row.message_offset, message_id, result.transaction_id
        )

    async def _replay(self, row_id: UUID, key: Key, draft: Draft) -> ReplayRow:
        encoded = self._encryption.encode(key[0], draft.records)
        return await self._letters.replay(
            row_id, *key, draft.hashes[0], encoded.size, encoded.blob, encoded.sealed
        )
