"""Histories written by hand, to show the checker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field

from tests.chaos.checker import check
from tests.chaos.consumer import STATUSES
from tests.chaos.history import (
    Ack,
    Blow,
    Claim,
    History,
    Kind,
    Letter,
    Outcome,
    Place,
    Push,
    Said,
    Seek,
    Status,
    Transaction,
    Verb,
)

if TYPE_CHECKING:
    from tests.chaos.checker import Rule

PLACE = Place("q", "p")
LEASE_SECONDS = 10.0


@define
class Story:
    """A history written by hand, of one group and one partition. Times are numbers of seconds."""

    history: History = field(factory=lambda: History(frozenset({"g"})))
    log: list[str] = field(factory=list)
    letters: dict[str, Letter] = field(factory=dict)

    def push(self, names: str, at: float, status: Status = Status.QUEUED, **more: Any) -> None:
        """One request that takes a second; each letter is a message."""
        answered = None if status is Status.UNKNOWN else at + 1
        request = len(self.history.pushes)
        for index, name in enumerate(names):
            push = Push(request, index, 0, PLACE, name, at, answered, status)
            self.history.pushes.append(evolve(push, **more))
        if status in (Status.QUEUED, Status.BUFFERED):
            self.log += names

    def claim(self, names: str, at: float, lease: str, **more: Any) -> None:
        """A pop that takes a second; message ids are the capital letters."""
        ids, upper = tuple(names), tuple(names.upper())
        claim = Claim("g", PLACE, lease, at, at + 1, LEASE_SECONDS, 1, ids, upper)
        self.history.claims.append(evolve(claim, **more))

    def ack(
        self,
        names: str,
        at: float,
        lease: str,
        verb: Verb = Verb.COMPLETED,
        *,
        lost: bool = False,
        dead: bool = False,
        transaction: int | None = None,
    ) -> None:
        """An ack that takes a second and succeeds, or whose answer is lost."""
        said = tuple(Said(name, verb, None if lost else True, dead) for name in names)
        answered = None if lost else at + 1
        self.history.acks.append(Ack("g", PLACE, lease, at, answered, said, transaction))

    def seek(self, at: float, target: str | None = None, *, lost: bool = False) -> None:
        """A seek that takes a second: to the beginning, or the time of a message."""
        self.history.seeks.append(Seek("g", (PLACE,), at, None if lost else at + 1, target))

    def transact(self, number: int, at: float, outcome: Outcome, pushed: str) -> None:
        """An attempt that takes a second: of it, what it pushed."""
        answered = None if outcome is Outcome.UNKNOWN else at + 1
        items = tuple((PLACE, name) for name in pushed)
        self.history.transactions.append(Transaction(number, at, answered, outcome, items))
        status = STATUSES[outcome]
        for name in pushed:
            self.history.pushes.append(Push(-number, 0, -1, PLACE, name, at, answered, status))

    def blow(self, kind: Kind, began: float, ended: float) -> None:
        self.history.blows.append(Blow(kind, None, began, ended))

    def broken(self) -> set[Rule]:
        return {
            violation.rule for violation in check(self.history, {PLACE: self.log}, self.letters)
        }


def four_messages() -> Story:
    """Messages a to d, delivered and acked in two batches."""
    story = Story()
    story.push("ab", 0)
    story.push("cd", 2)
    story.claim("ab", 4, "one")
    story.ack("ab", 6, "one")
    story.claim("cd", 8, "two")
    story.ack("cd", 10, "two")
    return story
