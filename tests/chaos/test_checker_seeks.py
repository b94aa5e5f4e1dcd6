"""What a seek allows, and what it promises."""

from __future__ import annotations

import pytest
from attrs import evolve

from tests.chaos.checker import Rule
from tests.chaos.history import Place, Status, Verb
from tests.chaos.story import Story, four_messages


@pytest.fixture
def story() -> Story:
    return four_messages()


def test_what_was_acked_comes_again_after_a_seek(story: Story) -> None:
    story.seek(20)
    story.claim("abcd", 22, "three")
    assert story.broken() == set()


def test_or_while_it_is_answered_but_not_before(story: Story) -> None:
    story.seek(20)
    story.claim("abcd", 20.5, "three")
    assert story.broken() == set()
    story.history.claims[-1] = evolve(story.history.claims[-1], sent=18, received=19)
    assert Rule.ACKED_AGAIN in story.broken()


def test_a_seek_of_others_allows_nothing(story: Story) -> None:
    story.seek(20)
    story.history.seeks[0] = evolve(story.history.seeks[0], places=(Place("q", "other"),))
    story.claim("abcd", 22, "three", attempt=2)
    assert story.broken() == {Rule.ACKED_AGAIN}
    story.seek(20)
    story.history.seeks[1] = evolve(story.history.seeks[1], group="h")
    assert story.broken() == {Rule.ACKED_AGAIN}


def test_it_allows_everything_once_only(story: Story) -> None:
    story.seek(20)
    story.claim("abcd", 22, "three")
    story.ack("abcd", 24, "three")
    assert story.broken() == set()
    story.claim("cd", 60, "four", attempt=2)
    assert story.broken() == {Rule.ACKED_AGAIN}


def test_it_ends_leases_and_starts_retries_anew() -> None:
    story = Story()
    story.push("ab", 0)
    story.claim("ab", 4, "one")
    story.seek(6)
    story.claim("ab", 8, "two")
    assert story.broken() == set()
    story.history.seeks[0] = evolve(story.history.seeks[0], sent=1, answered=2)
    assert story.broken() == {Rule.REDELIVERED, Rule.TWO_LEASES, Rule.ATTEMPT}


def test_nothing_came_again(story: Story) -> None:
    story.seek(20)
    assert story.broken() == {Rule.REPLAYED}


def test_not_all_came_again(story: Story) -> None:
    story.seek(20)
    story.claim("ab", 22, "three")
    assert story.broken() == {Rule.REPLAYED}
    story.claim("d", 60, "four", attempt=2)
    assert story.broken() == {Rule.REPLAYED, Rule.SKIPPED}


def test_only_the_end_came_again(story: Story) -> None:
    """The cursor was not put back far enough."""
    story.seek(20)
    story.claim("cd", 22, "three")
    assert story.broken() == {Rule.REPLAYED, Rule.SKIPPED}


def test_a_seek_to_a_message_begins_there_or_before(story: Story) -> None:
    story.seek(20, "c")
    story.claim("cd", 22, "three")
    assert story.broken() == set()
    story.history.claims[-1] = evolve(
        story.history.claims[-1], transaction_ids=tuple("bcd"), message_ids=tuple("BCD")
    )
    assert story.broken() == set()


def test_a_seek_to_a_message_begins_behind_it(story: Story) -> None:
    story.seek(20, "c")
    story.claim("d", 22, "three")
    assert story.broken() == {Rule.REPLAYED, Rule.SKIPPED}


def test_a_seek_further_on_may_skip_what_another_brings_back(story: Story) -> None:
    story.seek(20)
    story.seek(20.5, "c")
    story.claim("cd", 22, "three")
    assert story.broken() == set()
    # The other way round it can't: the last one counts.
    story.history.seeks[1] = evolve(story.history.seeks[1], sent=17, answered=18)
    assert story.broken() == {Rule.REPLAYED, Rule.SKIPPED}


def test_an_ack_under_a_lease_that_a_seek_has_ended_moves_nothing() -> None:
    story = Story()
    story.push("abcd", 0)
    story.claim("ab", 4, "one")
    story.seek(6)
    story.ack("ab", 8, "one", lost=True)
    story.claim("abcd", 10, "two")
    assert story.broken() == set()
    story.history.claims[-1] = evolve(
        story.history.claims[-1], transaction_ids=tuple("cd"), message_ids=tuple("CD")
    )
    assert story.broken() == {Rule.SKIPPED, Rule.REPLAYED}


def test_a_seek_that_nobody_answered_may_have_happened_or_not(story: Story) -> None:
    story.seek(20, lost=True)
    assert story.broken() == set()
    story.claim("abcd", 30, "three")
    assert story.broken() == set()
    # It can't happen after its client, the broker and PostgreSQL have all given up.
    story.ack("abcd", 32, "three")
    story.push("e", 90)
    story.claim("e", 92, "four")
    story.ack("e", 94, "four")
    story.claim("e", 130, "five", attempt=2)
    assert story.broken() == {Rule.ACKED_AGAIN}


def test_a_seek_that_nobody_answered_may_never_have_happened(story: Story) -> None:
    story.seek(20, lost=True)
    story.push("e", 90)
    story.claim("e", 92, "three")
    assert story.broken() == set()


def test_a_seek_afterwards_explains_nothing(story: Story) -> None:
    del story.history.acks[0]
    story.seek(30, "c")
    story.claim("cd", 32, "three")
    assert story.broken() == {Rule.SKIPPED, Rule.TWO_LEASES}


@pytest.mark.parametrize("verb", [Verb.RETRY, Verb.FAILED])
def test_nacks_after_a_seek_mean_what_they_did(story: Story, verb: Verb) -> None:
    story.seek(20)
    story.claim("abcd", 22, "three")
    story.ack("a", 24, "three", verb)
    story.claim("abcd", 26, "four", attempt=2)
    assert story.broken() == set()


def test_what_is_pushed_after_a_seek_is_delivered_too(story: Story) -> None:
    story.seek(20)
    story.claim("abcd", 22, "three")
    story.push("e", 30, Status.BUFFERED)
    assert story.broken() == {Rule.UNDELIVERED, Rule.REPLAYED}
