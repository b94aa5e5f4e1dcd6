"""The checker accepts what the broker may do; each rule refuses the least that it forbids."""

from __future__ import annotations

import pytest
from attrs import evolve

from tests.chaos.checker import Rule
from tests.chaos.history import Ack, Extension, Kind, Said, Status, Verb
from tests.chaos.story import PLACE, Story, four_messages


@pytest.fixture
def story() -> Story:
    return four_messages()


def test_a_good_history(story: Story) -> None:
    assert story.broken() == set()


# -- what is stored --------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [Status.QUEUED, Status.BUFFERED, Status.DUPLICATE])
def test_accepted_and_not_stored(story: Story, status: Status) -> None:
    story.push("e", 4, Status.UNKNOWN)
    story.push("e", 6, status)
    story.log = list("abcd")
    assert story.broken() == {Rule.LOST}


@pytest.mark.parametrize("status", [Status.UNKNOWN, Status.FAILED])
def test_what_was_not_accepted_may_be_lost(story: Story, status: Status) -> None:
    story.push("e", 4, status)
    assert story.broken() == set()


@pytest.mark.parametrize("status", [Status.UNKNOWN, Status.FAILED])
def test_what_was_not_accepted_may_be_stored(story: Story, status: Status) -> None:
    story.push("e", 4, status)
    story.log.append("e")
    assert story.broken() == {Rule.UNDELIVERED}
    story.claim("e", 12, "three")
    assert story.broken() == set()


def test_stored_twice(story: Story) -> None:
    story.log.append("d")
    assert Rule.STORED_TWICE in story.broken()


def test_stored_but_never_pushed(story: Story) -> None:
    story.log.append("x")
    story.claim("x", 12, "three")
    assert story.broken() == {Rule.INVENTED}


def test_queued_twice(story: Story) -> None:
    story.push("d", 4)
    story.log.pop()
    assert story.broken() == {Rule.FALSE_ANSWER}


def test_a_duplicate_of_nothing(story: Story) -> None:
    story.push("e", 4, Status.DUPLICATE)
    story.log.append("e")
    story.claim("e", 12, "three")
    assert story.broken() == {Rule.FALSE_ANSWER}


def test_a_duplicate_of_what_was_pushed_later(story: Story) -> None:
    story.push("e", 4, Status.DUPLICATE)
    story.push("e", 6)
    story.claim("e", 12, "three")
    assert story.broken() == {Rule.FALSE_ANSWER}


def test_a_duplicate_after_a_lost_answer(story: Story) -> None:
    story.push("e", 4, Status.UNKNOWN)
    story.push("e", 5, Status.DUPLICATE, message_id="E")
    story.log.append("e")
    story.claim("e", 12, "three")
    assert story.broken() == set()


def test_another_message_id(story: Story) -> None:
    story.push("d", 4, Status.DUPLICATE, message_id="not D")
    assert story.broken() == {Rule.FALSE_ANSWER}


def test_two_messages_of_one_message_id(story: Story) -> None:
    claim = story.history.claims[1]
    story.history.claims[1] = evolve(claim, message_ids=("B", "D"))
    assert story.broken() == {Rule.NAMED_TWICE}


def test_another_message_id_than_was_said_of_what_is_buffered(story: Story) -> None:
    story.push("e", 4, Status.BUFFERED, message_id="E")
    story.claim("e", 12, "three")
    assert story.broken() == set()
    story.history.pushes[-1] = evolve(story.history.pushes[-1], message_id="not E")
    assert story.broken() == {Rule.FALSE_ANSWER}


def test_what_was_buffered_may_be_the_duplicate_of_another_attempt(story: Story) -> None:
    story.push("e", 4, Status.UNKNOWN)
    story.push("e", 5, Status.BUFFERED, message_id="not E")
    story.claim("e", 12, "three")
    assert story.broken() == set()


def test_the_message_id_of_what_was_not_accepted_means_nothing(story: Story) -> None:
    story.push("e", 4, Status.FAILED, message_id="not E")
    story.log.append("e")
    story.claim("e", 12, "three")
    assert story.broken() == set()


# -- order of pushes -------------------------------------------------------------------------------


def test_a_later_push_is_stored_first(story: Story) -> None:
    story.log = list("cdab")
    assert Rule.PUSH_ORDER in story.broken()


def test_pushes_at_the_same_time_may_be_stored_either_way() -> None:
    story = Story()
    story.push("a", 0)
    story.push("b", 0.5)
    story.log = list("ba")
    story.claim("ba", 4, "one")
    assert story.broken() == set()


def test_what_was_queued_began_with_that_request() -> None:
    """Had the attempt before it been committed, it would have been a duplicate."""
    story = Story()
    story.push("a", 0, Status.UNKNOWN)
    story.push("a", 10)
    story.push("b", 5)
    story.claim("ab", 12, "one")
    assert story.broken() == {Rule.PUSH_ORDER}


def test_a_request_is_turned_around() -> None:
    story = Story()
    story.push("ab", 0)
    story.log = list("ba")
    story.claim("ba", 4, "one")
    assert story.broken() == {Rule.PUSH_ORDER}


def buffered() -> Story:
    story = Story()
    story.push("a", 0, Status.BUFFERED)
    story.push("b", 2, Status.BUFFERED)
    story.log = list("ba")
    story.claim("ba", 4, "one")
    return story


def test_buffered_pushes_are_turned_around() -> None:
    assert buffered().broken() == {Rule.BUFFERED_ORDER}


def test_brokers_replay_beside_each_other() -> None:
    story = buffered()
    story.history.pushes[0] = evolve(story.history.pushes[0], broker=1)
    assert story.broken() == set()


def test_a_buffered_push_whose_commit_happened_all_the_same() -> None:
    story = buffered()
    story.blow(Kind.DATABASE_CUT, 2.5, 5)
    assert story.broken() == set()


@pytest.mark.parametrize("began", [-3, 6])
def test_a_fault_before_or_after_explains_nothing(began: float) -> None:
    story = buffered()
    story.blow(Kind.DATABASE_CUT, began, began + 2)
    assert story.broken() == {Rule.BUFFERED_ORDER}


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_buffered_push_whose_earlier_attempt_may_have_been_committed(name: str) -> None:
    story = buffered()
    story.history.pushes.insert(
        0, evolve(story.history.pushes[0], transaction_id=name, status=Status.UNKNOWN)
    )
    assert story.broken() == set()


def test_a_buffered_push_stands_behind_any_that_began_after_it() -> None:
    story = Story()
    story.push("a", 2, Status.BUFFERED)
    story.push("b", 1.2, Status.BUFFERED)
    story.push("c", 0.6, Status.BUFFERED)
    story.claim("abc", 4, "one")
    assert story.broken() == {Rule.BUFFERED_ORDER}


def test_queued_overtakes_buffered() -> None:
    story = Story()
    story.push("a", 0, Status.BUFFERED)
    story.push("b", 2)
    story.log = list("ba")
    story.claim("ba", 4, "one")
    assert story.broken() == set()


# -- delivery --------------------------------------------------------------------------------------


def test_never_delivered(story: Story) -> None:
    story.history.claims.pop()
    assert story.broken() == {Rule.UNDELIVERED}


def test_delivered_to_another_group_only(story: Story) -> None:
    story.history.groups |= {"h"}
    assert story.broken() == {Rule.UNDELIVERED}


def test_a_hole_in_a_batch(story: Story) -> None:
    story.push("e", 4)
    story.claim("ce", 30, "three")
    assert Rule.SKIPPED in story.broken()


def test_a_batch_out_of_order() -> None:
    story = Story()
    story.push("ab", 0)
    story.claim("ba", 4, "one")
    assert story.broken() == {Rule.SKIPPED}


def test_a_message_that_is_nowhere(story: Story) -> None:
    story.claim("z", 12, "three")
    assert story.broken() == {Rule.SKIPPED}


def test_later_messages_before_the_first_were_acked(story: Story) -> None:
    del story.history.acks[0]
    assert story.broken() == {Rule.SKIPPED, Rule.TWO_LEASES}


def test_an_ack_whose_answer_was_lost_may_count(story: Story) -> None:
    story.history.acks.clear()
    story.ack("ab", 6, "one", lost=True)
    assert story.broken() == set()


def test_a_failure_may_dead_letter_a_retry_never(story: Story) -> None:
    story.history.acks.clear()
    story.ack("ab", 6, "one", Verb.FAILED)
    assert story.broken() == set()
    story.history.acks.clear()
    story.ack("ab", 6, "one", Verb.RETRY)
    assert story.broken() == {Rule.SKIPPED}


def test_acked_and_delivered_again(story: Story) -> None:
    story.claim("cd", 60, "three", attempt=2)
    assert story.broken() == {Rule.ACKED_AGAIN}


def test_not_even_a_crash_brings_back_what_was_acked(story: Story) -> None:
    story.blow(Kind.POSTGRES_KILL, 12, 13)
    story.claim("cd", 60, "three", attempt=2)
    assert story.broken() == {Rule.ACKED_AGAIN}


def forgotten(at: float) -> Story:
    """A batch that nobody acked, delivered again at that time."""
    story = Story()
    story.push("ab", 0)
    story.claim("ab", 4, "one")
    story.claim("ab", at, "two", attempt=2)
    return story


def test_delivered_again_while_leased() -> None:
    assert forgotten(8).broken() == {Rule.REDELIVERED, Rule.TWO_LEASES}


def test_delivered_again_after_the_lease() -> None:
    assert forgotten(14).broken() == set()


def test_a_crash_later_on_explains_nothing() -> None:
    story = forgotten(8)
    story.blow(Kind.POSTGRES_KILL, 20, 21)
    assert story.broken() == {Rule.REDELIVERED, Rule.TWO_LEASES}


def test_a_lease_beside_another_of_other_messages(story: Story) -> None:
    story.history.acks.pop()
    story.claim("ab", 15, "three", attempt=2)
    assert story.broken() == {Rule.ACKED_AGAIN, Rule.TWO_LEASES}
    # In whichever order they were answered.
    story.history.claims[1] = evolve(story.history.claims[1], sent=16.5, received=17)
    assert story.broken() == {Rule.ACKED_AGAIN, Rule.TWO_LEASES}


def test_an_ack_that_was_refused_promises_nothing() -> None:
    story = forgotten(14)
    [said] = [Said(name, Verb.COMPLETED, success=False) for name in "a"]
    story.history.acks.append(Ack("g", PLACE, "one", 6, 7, (said,)))
    assert story.broken() == set()


def test_an_extended_lease() -> None:
    story = forgotten(14)
    story.history.extensions.append(Extension("one", 6, 20))
    assert story.broken() == {Rule.REDELIVERED, Rule.TWO_LEASES}


def test_delivered_again_after_a_nack() -> None:
    story = forgotten(8)
    story.ack("b", 6, "one", Verb.RETRY)
    assert story.broken() == set()


def test_delivered_again_after_an_ack_that_nobody_answered() -> None:
    story = forgotten(8)
    story.ack("ab", 6, "one", lost=True)
    assert story.broken() == {Rule.REDELIVERED}


def test_a_crash_of_the_database_may_lose_a_lease() -> None:
    story = forgotten(8)
    story.blow(Kind.POSTGRES_KILL, 6, 7)
    assert story.broken() == set()
    story.history.blows[0] = evolve(story.history.blows[0], began=1, ended=3)
    assert story.broken() == {Rule.REDELIVERED, Rule.TWO_LEASES}


@pytest.mark.parametrize("kind", [k for k in Kind if k is not Kind.POSTGRES_KILL])
def test_nothing_else_may_lose_a_lease(kind: Kind) -> None:
    story = forgotten(8)
    story.blow(kind, 6, 7)
    assert story.broken() == {Rule.REDELIVERED, Rule.TWO_LEASES}


def test_two_live_leases() -> None:
    story = Story()
    story.push("abcd", 0)
    story.claim("ab", 4, "one")
    story.ack("a", 6, "one")
    story.claim("bcd", 8, "two", attempt=2)
    assert story.broken() == {Rule.REDELIVERED, Rule.TWO_LEASES}


def test_an_ack_under_an_old_lease_ends_the_live_one() -> None:
    story = forgotten(14)
    story.push("cd", 2)
    story.ack("ab", 16, "one")
    story.claim("cd", 18, "three")
    assert story.broken() == {Rule.TWO_LEASES}


def test_a_redelivery_that_pretends_to_be_the_first() -> None:
    story = forgotten(14)
    story.history.claims[1] = evolve(story.history.claims[1], attempt=1)
    assert story.broken() == {Rule.ATTEMPT}
    story.blow(Kind.POSTGRES_KILL, 6, 7)
    assert story.broken() == set()


def test_the_first_delivery_may_be_answered_last() -> None:
    story = forgotten(20)
    story.history.claims[0] = evolve(story.history.claims[0], received=22)
    story.history.claims[1] = evolve(story.history.claims[1], attempt=2)
    assert story.broken() == set()
