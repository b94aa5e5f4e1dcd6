"""Messages as an operator looks at them: a page of the newest, or one in all its detail."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from attrs import frozen

from queen_trio.model.inspection import MessageFilter, MessageStatus, Page
from queen_trio.model.message import hash_of
from queen_trio.store import segments

from .outage import ride_out

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from queen_trio.store.dlq import DeadLetterRow, DeadLetterStore
    from queen_trio.store.messages import MessageGroupRow, MessageStore

    from .encryption import Encryption


@frozen
class ListedMessage:
    """A message where it stands; `record` is its object as the log holds it, payload verbatim."""

    queue: str
    partition: str
    partition_id: UUID
    offset: int
    created_at: datetime
    status: MessageStatus
    record: bytes


@frozen
class MessageDetail:
    """One message and what each group has done with it.

    `record` None: retention has removed it, and `letter` is what is left.
    """

    queue: str
    partition: str
    offset: int
    created_at: datetime | None
    status: MessageStatus
    record: bytes | None
    letter: DeadLetterRow | None
    groups: list[MessageGroupRow]


class MessageService:
    """Shows messages and changes none; every method waits out a short outage of the database."""

    def __init__(
        self,
        store: MessageStore,
        letters: DeadLetterStore,
        encryption: Encryption,
        max_bytes: int,
    ) -> None:
        """`max_bytes` bounds an answer, as it does a pop's (spec 8.11)."""
        self._store = store
        self._letters = letters
        self._encryption = encryption
        self._max_bytes = max_bytes

    async def read_page(self, which: MessageFilter, page: Page) -> list[ListedMessage]:
        """Read a page of messages, newest first; it may end early where it would grow large."""
        rows = await ride_out(partial(self._store.read_page, which, page, self._max_bytes))
        listed: list[ListedMessage] = []
        for row in rows:
            records = segments.split(segments.decode(row.blob))
            listed += [
                ListedMessage(
                    row.queue_name,
                    row.partition_name,
                    row.partition_id,
                    offset,
                    row.created_at,
                    MessageStatus(status),
                    self._encryption.open_record(row.queue_name, records[offset - row.base_offset]),
                )
                for offset, status in zip(row.offsets, row.statuses, strict=True)
            ]
        return listed

    async def detail(
        self, partition_id: UUID, transaction_id: str, group: str
    ) -> MessageDetail | None:
        """Show the newest message of a transactionId, or what a dead letter kept of it.

        `status` is judged for `group`. None when there is neither.
        """
        found = await ride_out(partial(self._store.find, partition_id, hash_of(transaction_id)))
        if found is not None:
            groups = await ride_out(partial(self._store.groups, partition_id, found.message_offset))
            records = segments.split(segments.decode(found.blob))
            record = records[found.message_offset - found.base_offset]
            return MessageDetail(
                found.queue_name,
                found.partition_name,
                found.message_offset,
                found.created_at,
                _status_for(group, groups),
                self._encryption.open_record(found.queue_name, record),
                None,
                groups,
            )
        letters = await ride_out(
            partial(self._letters.of_message, partition_id, transaction_id, None)
        )
        if not letters:
            return None
        newest = self._encryption.open_letter(letters[0])
        groups = await ride_out(partial(self._store.groups, partition_id, newest.offset))
        return MessageDetail(
            newest.queue_name,
            newest.partition_name,
            newest.offset,
            newest.created_at,
            MessageStatus.DEAD_LETTER,
            None,
            newest,
            groups,
        )


def _status_for(group: str, groups: list[MessageGroupRow]) -> MessageStatus:
    """What the message is to this group; one without a cursor has everything before it."""
    for row in groups:
        if row.consumer_group == group:
            return MessageStatus(row.status)
    return MessageStatus.PENDING
