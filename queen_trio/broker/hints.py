"""What brokers tell each other: hints that something may have changed, never the thing itself.

One interface, two ends: `LocalHints` acts on this broker; the mesh's implementation sends frames,
and calls `LocalHints` for the frames that it receives. A hint that is lost costs latency only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from attrs import frozen

from .maintenance import Maintenance, Switch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .candidates import Candidates
    from .segment import Key
    from .wakeups import Wakeups


class Hints(Protocol):
    """The four kinds of hint of spec 3; every call returns at once."""

    def messages_available(self, keys: Iterable[Key]) -> None:
        """Each (queue, partition) has new messages."""

    def claims_available(self, keys: Iterable[Key], group: str) -> None:
        """Each (queue, partition) has messages that this group could not claim before."""

    def leases_ended(self, keys: Iterable[Key], group: str) -> None:
        """The group's lease of each (queue, partition) has ended, with nothing left to claim."""

    def queue_changed(self, queue: str) -> None:
        """The options of the queue, or cursors of its groups, have changed."""

    def queue_deleted(self, queue: str) -> None:
        """The queue is gone."""

    def maintenance_set(self, enabled: bool) -> None:
        """Push maintenance was switched."""

    def pop_maintenance_set(self, enabled: bool) -> None:
        """Pop maintenance was switched."""


@frozen
class LocalHints:
    """Acts on this broker alone."""

    wakeups: Wakeups
    candidates: Candidates | None
    maintenance: Maintenance

    def messages_available(self, keys: Iterable[Key]) -> None:
        keys = tuple(keys)
        if self.candidates is not None:
            for queue, partition in keys:
                self.candidates.mark(queue, partition)
        self.wakeups.notify(keys)

    def claims_available(self, keys: Iterable[Key], group: str) -> None:
        keys = tuple(keys)
        if self.candidates is not None:
            for queue, partition in keys:
                self.candidates.promote(queue, partition, group)
        self.wakeups.notify(keys, group)

    def leases_ended(self, keys: Iterable[Key], group: str) -> None:
        if self.candidates is not None:
            for queue, partition in keys:
                self.candidates.release(queue, partition, group)

    def queue_changed(self, queue: str) -> None:
        if self.candidates is not None:
            self.candidates.unseed(queue)
        self.wakeups.notify_queue(queue)

    def queue_deleted(self, queue: str) -> None:
        if self.candidates is not None:
            self.candidates.drop(queue)
        self.wakeups.notify_queue(queue)

    def maintenance_set(self, enabled: bool) -> None:
        self.maintenance.set(Switch.PUSH, enabled=enabled)

    def pop_maintenance_set(self, enabled: bool) -> None:
        self.maintenance.set(Switch.POP, enabled=enabled)


@frozen
class FanOut:
    """Passes every hint on to several, in order."""

    to: Sequence[Hints]

    def messages_available(self, keys: Iterable[Key]) -> None:
        keys = tuple(keys)
        for hints in self.to:
            hints.messages_available(keys)

    def claims_available(self, keys: Iterable[Key], group: str) -> None:
        keys = tuple(keys)
        for hints in self.to:
            hints.claims_available(keys, group)

    def leases_ended(self, keys: Iterable[Key], group: str) -> None:
        keys = tuple(keys)
        for hints in self.to:
            hints.leases_ended(keys, group)

    def queue_changed(self, queue: str) -> None:
        for hints in self.to:
            hints.queue_changed(queue)

    def queue_deleted(self, queue: str) -> None:
        for hints in self.to:
            hints.queue_deleted(queue)

    def maintenance_set(self, enabled: bool) -> None:
        for hints in self.to:
            hints.maintenance_set(enabled)

    def pop_maintenance_set(self, enabled: bool) -> None:
        for hints in self.to:
            hints.pop_maintenance_set(enabled)


def tell_released(
    hints: Hints, queue: str | None, partition: str | None, group: str, *, more: bool
) -> None:
    """Pass on that an ack released a lease (names None: it did not)."""
    if queue is None or partition is None:
        return
    if more:
        hints.claims_available([(queue, partition)], group)
    else:
        hints.leases_ended([(queue, partition)], group)
