"""Encryption at rest: which queues want it, and their payloads on the way in and out.

What this broker remembers of a queue may be stale; the database decides at every commit (push_v1).
So nobody has to refresh the memory or to hear of changes: the worst that stale memory costs is one
more round trip.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import structlog
from attrs import frozen

from queen_trio.errors import ClientError, DatabaseError
from queen_trio.model.encryption import (
    PayloadCipher,
    Undecipherable,
    envelope_of_letter,
    is_sealed,
    open_payload,
    open_record,
    seal_record,
    withhold,
)
from queen_trio.store import segments
from queen_trio.store.encryption import encrypted_queues
from queen_trio.store.sqlstate import ENCRYPTION_DIFFERS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from queen_trio.store.dlq import DeadLetterRow
    from queen_trio.store.queries import Store

log = structlog.get_logger(__name__)

T = TypeVar("T")

# How often a call may find that an option has changed once more before it gives up.
AGREE_ATTEMPTS: Final = 5


class EncryptionKeyMissing(ClientError):
    """A queue wants encryption and this broker has no key: nothing is stored in the clear."""

    def __init__(self, queue: str) -> None:
        super().__init__(
            f"queue {queue!r} needs encryption, and this broker has no QUEEN_ENCRYPTION_KEY",
            code="encryption_key_missing",
        )


class Encoded(NamedTuple):
    """A segment as it is stored; `size` in bytes before compression."""

    blob: bytes
    size: int
    sealed: bool


@frozen
class EncryptionStatistics:
    """How many payloads could not be opened since the start, each time one was asked for."""

    undecipherable: int


class Encryption:
    """The key of this broker and the queues that it knows to be encrypted."""

    def __init__(self, store: Store, key: bytes | None) -> None:
        self._store = store
        self._cipher = None if key is None else PayloadCipher(key)
        self._encrypted: set[str] = set()
        self._undecipherable = 0
        self._complained: set[str] = set()

    @property
    def has_key(self) -> bool:
        """Whether this broker can encrypt."""
        return self._cipher is not None

    def note(self, queue: str, *, enabled: bool) -> None:
        """Remember a queue's option."""
        if enabled:
            self._encrypted.add(queue)
        else:
            self._encrypted.discard(queue)

    def forget(self, queue: str) -> None:
        """Remember a queue no longer; the next commit tells."""
        self._encrypted.discard(queue)

    def statistics(self) -> EncryptionStatistics:
        """What can't be read."""
        return EncryptionStatistics(self._undecipherable)

    # -- on the way in -------------------------------------------------------------------------

    def encode(self, queue: str, records: Sequence[bytes]) -> Encoded:
        """Make a segment's blob, sealed if the queue wants that.

        Raises `EncryptionKeyMissing`. Call it inside of what `agree` repeats.
        """
        if queue not in self._encrypted:
            return Encoded(*segments.encode(records), False)
        if self._cipher is None:
            raise EncryptionKeyMissing(queue)
        seal = partial(seal_record, self._cipher)
        return Encoded(*segments.encode([seal(record) for record in records]), True)

    def seal_for_disk(self, queue: str, records: Sequence[bytes]) -> Sequence[bytes]:
        """Return records as they may lie in the spool: sealed whatever the queue, given a key.

        While PostgreSQL is away nobody can tell what a queue wants. Raises `EncryptionKeyMissing`
        where the queue is known to want it and there is no key.
        """
        if self._cipher is not None:
            return [seal_record(self._cipher, record) for record in records]
        if queue in self._encrypted:
            raise EncryptionKeyMissing(queue)
        return records

    def open_from_disk(self, records: Sequence[bytes]) -> list[bytes]:
        """Return spooled records as they were pushed; raises `Undecipherable`."""
        return [
            open_record(self._cipher, record) if is_sealed(record) else record for record in records
        ]

    async def agree(self, queues: Collection[str], call: Callable[[], Awaitable[T]]) -> T:
        """Repeat `call` until it encodes as the queues want it now; raises what it raises."""
        for _ in range(AGREE_ATTEMPTS - 1):
            try:
                return await call()
            except DatabaseError as error:
                if error.sqlstate != ENCRYPTION_DIFFERS:
                    raise
            names = set(queues)
            encrypted = await encrypted_queues(self._store.pool, self._store.tenant, list(names))
            for name in names:
                self.note(name, enabled=name in encrypted)
        return await call()

    # -- on the way out ------------------------------------------------------------------------

    def open_entries(self, queue: str, entries: list[bytes]) -> list[bytes]:
        """Return entries of one segment as they were pushed, each as `open_record` does.

        A segment is sealed as a whole, so its first record tells of all.
        """
        if not is_sealed(entries[0]):
            return entries
        return [self.open_record(queue, entry + b"}")[:-1] for entry in entries]

    def open_record(self, queue: str, record: bytes) -> bytes:
        """Return a record as it was pushed; what can't be opened has `data` null and says why."""
        if not is_sealed(record):
            return record
        try:
            return open_record(self._cipher, record)
        except Undecipherable as error:
            self._complain(queue, error)
            return withhold(record, str(error))

    def open_letter(self, letter: DeadLetterRow) -> DeadLetterRow:
        """Return a dead letter with its payload as it was pushed, or null and the reason."""
        envelope = envelope_of_letter(letter.payload)
        if envelope is None:
            return letter
        try:
            payload = open_payload(
                self._cipher, envelope, letter.message_id, letter.transaction_id
            ).decode()
        except Undecipherable as error:
            self._complain(letter.queue_name, error)
            return letter._replace(payload="null", decryption_error=str(error))
        return letter._replace(payload=payload)

    def _complain(self, queue: str, error: Undecipherable) -> None:
        """Count it, and log the first one of a queue."""
        self._undecipherable += 1
        if queue not in self._complained:
            self._complained.add(queue)
            log.warning("payload not decipherable", queue=queue, error=str(error))
