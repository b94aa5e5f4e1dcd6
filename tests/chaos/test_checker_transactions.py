"""Transactions are whole; dead letters are where they belong."""

from __future__ import annotations

import pytest
from attrs import evolve

from tests.chaos.checker import Rule
from tests.chaos.history import Letter, Outcome, Push, Status, Verb
from tests.chaos.story import PLACE, Story


@pytest.fixture
def story() -> Story:
    """Messages a and b are claimed; a transaction may ack them and push c and d."""
    story = Story()
    story.push("ab", 0)
    story.claim("ab", 4, "one")
    return story


def commit(story: Story, outcome: Outcome = Outcome.COMMITTED) -> None:
    story.transact(1, 6, outcome, "cd")
    story.ack("ab", 6, "one", lost=outcome is Outcome.UNKNOWN, transaction=1)
    story.log += "cd"
    story.claim("cd", 8, "two")


@pytest.mark.parametrize("outcome", [Outcome.COMMITTED, Outcome.UNKNOWN])
def test_a_transaction_that_happened(story: Story, outcome: Outcome) -> None:
    commit(story, outcome)
    assert story.broken() == set()


@pytest.mark.parametrize("outcome", [Outcome.COMMITTED, Outcome.UNKNOWN])
def test_half_of_its_pushes_are_stored(story: Story, outcome: Outcome) -> None:
    commit(story, outcome)
    story.log.remove("d")
    assert Rule.ATOMIC in story.broken()


def test_said_to_be_committed_and_not_stored(story: Story) -> None:
    story.transact(1, 6, Outcome.COMMITTED, "cd")
    assert story.broken() == {Rule.LOST}


def test_it_pushed_but_didnt_ack(story: Story) -> None:
    commit(story)
    story.claim("ab", 30, "three", attempt=2)
    assert story.broken() == {Rule.ACKED_AGAIN}


def test_it_acked_but_didnt_push(story: Story) -> None:
    """Nobody knows what came of it; the next claim shows that its ack was done."""
    story.transact(1, 6, Outcome.UNKNOWN, "xy")
    story.ack("ab", 6, "one", lost=True, transaction=1)
    assert story.broken() == set()
    story.push("cd", 2)
    story.claim("cd", 8, "two")
    assert story.broken() == {Rule.SKIPPED, Rule.TWO_LEASES}
    story.log += "xy"
    assert story.broken() == {Rule.UNDELIVERED}


def test_it_pushed_although_its_ack_was_refused(story: Story) -> None:
    commit(story)
    [ack] = story.history.acks
    refused = tuple(said._replace(success=False) for said in ack.said)
    story.history.acks[0] = evolve(ack, said=refused)
    assert story.broken() == {Rule.ATOMIC}


def test_refused_and_stored(story: Story) -> None:
    story.transact(1, 6, Outcome.REFUSED, "cd")
    assert story.broken() == set()
    story.ack("ab", 6, "one")
    story.log += "cd"
    story.claim("cd", 8, "two")
    assert story.broken() == {Rule.ATOMIC}


def test_refused_after_an_attempt_that_nobody_answered(story: Story) -> None:
    commit(story, Outcome.UNKNOWN)
    story.transact(1, 7.5, Outcome.REFUSED, "cd")
    assert story.broken() == set()


def test_repeated(story: Story) -> None:
    commit(story, Outcome.UNKNOWN)
    story.transact(1, 7.5, Outcome.REPEATED, "cd")
    assert story.broken() == set()


def test_repeated_with_nothing_to_repeat(story: Story) -> None:
    commit(story, Outcome.REPEATED)
    assert story.broken() == {Rule.FALSE_ANSWER}


def test_repeated_and_not_stored(story: Story) -> None:
    story.transact(1, 6, Outcome.UNKNOWN, "cd")
    story.transact(1, 7.5, Outcome.REPEATED, "cd")
    assert story.broken() == {Rule.LOST}


# -- dead letters ----------------------------------------------------------------------------------

LETTER = Letter("g", PLACE, "a")


def bury(story: Story, verb: Verb = Verb.DLQ, *, dead: bool = True) -> None:
    story.ack("a", 6, "one", verb, dead=dead)
    story.claim("b", 8, "two", attempt=2)


@pytest.mark.parametrize("verb", [Verb.DLQ, Verb.FAILED])
def test_a_dead_letter(story: Story, verb: Verb) -> None:
    bury(story, verb)
    assert story.broken() == {Rule.LETTER}
    story.letters["1"] = LETTER
    assert story.broken() == set()


@pytest.mark.parametrize("verb", [Verb.COMPLETED, Verb.RETRY])
def test_a_dead_letter_of_what_nobody_gave_up(story: Story, verb: Verb) -> None:
    bury(story, Verb.DLQ)
    story.letters["1"] = LETTER
    story.ack("b", 10, "two", verb)
    assert story.broken() == set()
    story.letters["2"] = Letter("g", PLACE, "b")
    assert story.broken() == {Rule.LETTER}


def test_a_dead_letter_of_another_group(story: Story) -> None:
    bury(story)
    story.letters["1"] = Letter("h", PLACE, "a")
    assert story.broken() == {Rule.LETTER}


def test_a_dead_letter_of_a_transaction_that_didnt_happen(story: Story) -> None:
    story.transact(1, 6, Outcome.UNKNOWN, "cd")
    story.ack("a", 6, "one", Verb.DLQ, lost=True, transaction=1)
    story.letters["1"] = LETTER
    assert story.broken() == {Rule.LETTER}


@pytest.mark.parametrize("status", [Status.QUEUED, Status.UNKNOWN])
def test_moved_back(story: Story, status: Status) -> None:
    bury(story)
    story.history.moves["1"] = LETTER
    answered = 11 if status is Status.QUEUED else None
    story.history.pushes.append(Push(9, 0, -1, PLACE, "dlq:1", 10, answered, status))
    story.log.append("dlq:1")
    story.ack("b", 10, "two")
    story.claim("?", 12, "three", transaction_ids=("dlq:1",))
    assert story.broken() == set()
    story.letters["1"] = LETTER  # both there and moved
    assert story.broken() == {Rule.LETTER}


def test_neither_there_nor_moved_back(story: Story) -> None:
    bury(story)
    story.history.moves["1"] = LETTER
    story.history.pushes.append(Push(9, 0, -1, PLACE, "dlq:1", 10, None, Status.UNKNOWN))
    assert story.broken() == {Rule.LETTER}
    story.letters["1"] = LETTER
    assert story.broken() == set()
