"""Who may begin, who waits and who is refused: rules 16 and 19, cases 66 and 68."""

from dataclasses import replace

import pytest

from messages.errors import DeadlineExceeded, Overloaded, Unavailable
from tests.unit.cluster.admission_door import RULES, Door


def test_requests_begin_while_the_budget_lasts_and_then_wait() -> None:
    """Rule 16: counted in tokens, not in requests."""
    door = Door()

    door.enter("a", 60)
    door.enter("b", 40)
    door.enter("c", 1)

    assert door.begun == ["a", "b"]
    assert door.gauges() == (2, 100, 1, 1)


def test_what_leaves_makes_room_for_who_came_first() -> None:
    door = Door()
    door.enter("a", 100)
    door.enter("b", 50)
    door.enter("c", 50)
    door.enter("d", 50)

    door.leave("a")

    assert door.begun == ["a", "b", "c"]
    assert door.gauges() == (2, 100, 1, 50)


def test_the_lower_priority_value_goes_first() -> None:
    door = Door()
    door.enter("a", 100)
    door.enter("late", 60, priority=1)
    door.enter("usual", 60)
    door.enter("urgent", 60, priority=-1)

    door.leave("a")
    door.leave("urgent")
    door.leave("usual")

    assert door.begun == ["a", "urgent", "usual", "late"]


def test_smaller_ones_pass_what_does_not_fit() -> None:
    door = Door()
    door.enter("a", 60)
    door.enter("big", 80)
    door.enter("small", 30)

    assert door.begun == ["a", "small"]
    assert door.gauges() == (2, 90, 1, 80)


def test_nobody_passes_who_is_due_until_it_has_begun() -> None:
    """Case 66: half of the 10 s is kept for making room while nothing is known."""
    door = Door()
    door.enter("a", 60)
    door.enter("big", 80)
    door.clock.now_s = 4.9
    door.enter("in time", 10)
    door.clock.now_s = 5.0
    door.enter("too late", 10)

    waiting = list(door.begun)
    door.leave("a")

    assert waiting == ["a", "in time"]
    assert door.begun == ["a", "in time", "big", "too late"]


def test_more_urgent_ones_still_pass_who_is_due() -> None:
    door = Door()
    door.enter("a", 60)
    door.enter("big", 80)
    door.clock.now_s = 9.0

    door.enter("urgent", 10, priority=-1)

    assert door.begun == ["a", "urgent"]


def test_the_time_kept_for_making_room_is_what_it_takes() -> None:
    """A request held 100 tokens for 2 s, so 50 come back a second; 40 that lack need 0.8 s, kept with a margin: 1 s."""
    door = Door()
    door.run("before", 100, for_s=2.0)
    door.enter("a", 60)
    door.enter("big", 80)
    arrived_s = door.clock.now_s

    door.clock.now_s = arrived_s + 8.8
    door.enter("in time", 10)
    door.clock.now_s = arrived_s + 9.1
    door.enter("too late", 10)

    assert door.admission.drain_tokens_s == 50.0
    assert door.begun == ["before", "a", "in time"]


def test_how_fast_tokens_come_back_follows_the_last_requests() -> None:
    door = Door()
    for number in range(300):
        door.run(str(number), 100, for_s=1.0 if number < 100 else 4.0)

    assert door.admission.drain_tokens_s == pytest.approx(25.0, rel=0.15)


def test_one_that_is_larger_than_the_budget_runs_alone() -> None:
    door = Door()
    door.enter("a", 10)
    door.enter("huge", 500)
    door.leave("a")
    door.enter("b", 1)

    assert door.begun == ["a", "huge"]
    assert door.gauges() == (1, 500, 1, 1)


def test_a_line_that_is_full_answers_overloaded_at_once_with_the_time_to_come_again() -> None:
    """Rule 19: 50 tokens a second come back; 100 more than the 1,000 would wait: 2 s and a quarter."""
    door = Door()
    door.run("before", 100, for_s=2.0)
    door.enter("a", 100)
    door.enter("b", 900)

    door.enter("c", 200)

    error = door.refused["c"]
    assert isinstance(error, Overloaded)
    assert error.context == {"bound": "max_waiting_tokens", "retry_after_s": 2.5}
    assert door.gauges() == (1, 100, 1, 900)


@pytest.mark.parametrize(("tokens", "retry_after_s"), [(1, 0.5), (10_000, 60.0)])
def test_the_time_to_come_again_is_bounded(tokens: int, retry_after_s: float) -> None:
    door = Door()
    door.run("before", 100, for_s=2.0)
    door.enter("a", 100)
    door.enter("b", 1000)

    door.enter("c", tokens)

    assert door.refused["c"].context["retry_after_s"] == retry_after_s


def test_requests_are_bounded_by_number_too() -> None:
    door = Door(replace(RULES, max_requests=2))
    door.enter("a", 100)
    door.enter("b", 1)

    door.enter("c", 1)

    assert door.refused["c"].context["bound"] == "max_requests"
    assert door.gauges() == (1, 100, 1, 1)


def test_no_more_run_than_may_be_there() -> None:
    door = Door(replace(RULES, max_requests=2))

    for name in "abc":
        door.enter(name, 1)

    assert door.begun == ["a", "b"]
    assert list(door.refused) == ["c"]


def test_a_full_line_keeps_the_more_urgent() -> None:
    door = Door()
    door.enter("a", 100)
    door.enter("first", 400, priority=1)
    door.enter("last", 400, priority=1)

    door.enter("urgent", 500)

    assert list(door.refused) == ["last"]
    assert door.gauges() == (1, 100, 2, 900)


def test_without_a_bound_of_its_own_the_line_holds_what_the_budget_holds() -> None:
    door = Door(replace(RULES, max_waiting_tokens=None))
    door.enter("a", 100)
    door.enter("b", 60)
    door.enter("c", 40)

    door.enter("d", 1)

    assert list(door.refused) == ["d"]


def test_one_that_is_larger_than_the_line_may_wait_alone() -> None:
    door = Door()
    door.enter("a", 100)
    door.enter("huge", 5000)
    door.enter("more", 1)

    assert list(door.refused) == ["more"]
    assert door.admission.num_waiting == 1


def test_what_cannot_begin_in_time_is_refused_at_once() -> None:
    """50 tokens come back a second; after 150 more, 3 s and a quarter, it could begin."""
    door = Door()
    door.run("before", 100, for_s=2.0)
    door.enter("a", 100)
    door.enter("b", 50)

    door.enter("hopeless", 100, timeout_s=3.7)
    door.enter("possible", 100, timeout_s=3.8)

    assert isinstance(door.refused["hopeless"], Overloaded)
    assert door.refused["hopeless"].context["bound"] == "timeout_s"
    assert "possible" not in door.refused


def test_a_request_whose_time_is_over_leaves_the_line_with_an_error() -> None:
    door = Door()
    door.enter("a", 100)
    door.enter("b", 50, timeout_s=3.0)
    door.enter("c", 50, timeout_s=9.0)

    door.clock.now_s = 3.0
    door.note(door.admission.expire())
    door.clock.now_s = 9.0
    door.leave("a")

    assert [type(error) for error in door.refused.values()] == [DeadlineExceeded, DeadlineExceeded]
    assert door.begun == ["a"]
    assert door.gauges() == (0, 0, 0, 0)


def test_whose_time_is_over_does_not_begin_when_somebody_enters() -> None:
    door = Door()
    door.enter("a", 60)
    door.enter("b", 50, timeout_s=3.0)
    door.clock.now_s = 3.0

    door.enter("c", 30)

    assert list(door.refused) == ["b"]
    assert door.begun == ["a", "c"]


def test_without_workers_everybody_is_told_at_once() -> None:
    """Rule 17: 503, not a hang."""
    door = Door()
    door.enter("a", 100)
    door.enter("b", 50)

    door.note(door.admission.set_budget(0))
    door.enter("c", 1)

    assert [(name, type(error)) for name, error in door.refused.items()] == [("b", Unavailable), ("c", Unavailable)]
    assert {error.context["retry_after_s"] for error in door.refused.values()} == {0.5}
    door.leave("a")
    assert door.gauges() == (0, 0, 0, 0)


def test_a_larger_budget_lets_more_begin_and_a_smaller_one_stops_nobody() -> None:
    door = Door()
    door.enter("a", 100)
    door.enter("b", 50)

    door.note(door.admission.set_budget(150))
    door.note(door.admission.set_budget(10))
    door.enter("c", 5)
    door.leave("b")

    assert door.begun == ["a", "b"]
    assert door.gauges() == (1, 100, 1, 5)


def test_leaving_gives_back_once() -> None:
    """Rule 16: discharged exactly once, whatever is said again."""
    door = Door()
    door.enter("a", 60)
    door.enter("b", 40)
    door.enter("c", 50)

    door.leave("a", "a", "c", "c", "nobody")

    assert door.gauges() == (1, 40, 0, 0)


def test_fifty_refused_and_fifty_cancelled_leave_nothing_behind() -> None:
    """Case 68: ten run or wait at a time, fifty are refused; then all that are inside are cancelled, fifty in all."""
    door = Door()
    cancelled = 0
    for turn in range(5):
        for number in range(20):
            door.enter(f"{turn}.{number}", 20)
        inside = [f"{turn}.{number}" for number in range(20) if f"{turn}.{number}" not in door.refused]
        door.leave(*inside)
        cancelled += len(inside)

    assert (len(door.refused), cancelled) == (50, 50)
    assert door.gauges() == (0, 0, 0, 0)
