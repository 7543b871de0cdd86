import pytest
from hypothesis import given
from hypothesis import strategies as st

from messages.errors import ConfigError
from messages.fault_plan import FAULT_POINTS, VALUE_UNITS, Action, FaultRule, parse_faults

POINTS_OF_THE_RULE = (
    "worker.message",
    "handoff.close",
    "transfer.read",
    "clock",
    "registry.lookup",
    "engine.decode_step",
)


def test_every_part_of_a_rule_is_read() -> None:
    (rule,) = parse_faults(" handoff.close:delay=0.25*1+2@long-decode ")

    assert rule == FaultRule(
        point="handoff.close", action=Action.DELAY, value=0.25, times=1, skip=2, pool="long-decode"
    )


def test_a_point_with_one_action_needs_no_action() -> None:
    (rule,) = parse_faults("engine.preempt_once")

    assert (rule.point, rule.action) == ("engine.preempt_once", Action.PREEMPT)


def test_no_text_is_no_rule_and_commas_separate_several() -> None:
    assert parse_faults("") == parse_faults(" , ") == ()
    assert [rule.action for rule in parse_faults("handoff.open:drop,clock:skew=-3")] == [Action.DROP, Action.SKEW]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("handoff.clos:drop", 'did you mean "handoff.close"'),
        ("transfer.read:throtle=1", 'did you mean "throttle"'),
        ("transfer.read:skew=1", "it knows corrupt, delay, error, kill, throttle"),
        ("handoff.close", "needs an action"),
        ("handoff.close:drop=1", "drop takes no value"),
        ("handoff.close:delay", "needs a value in seconds"),
        ("handoff.close:delay=0", "must be more than 0"),
        ("transfer.read:throttle=-1", "must be more than 0"),
        ("handoff.close:drop+1*2", "is not of the form"),
        ("handoff.close:drop@", "is not of the form"),
        ("handoff.close:delay=soon", "is not of the form"),
    ],
)
def test_a_wrong_rule_is_refused_with_what_is_right(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_faults(text)

    assert says in str(caught.value)
    assert text in str(caught.value)


def test_the_faults_that_rule_26_asks_for_have_a_point() -> None:
    """Rule 26: drop, delay, corrupt, duplicate, kill, clock skew, an error per registry command."""
    assert FAULT_POINTS.keys() >= set(POINTS_OF_THE_RULE)
    assert {action for point in FAULT_POINTS.values() for action in point.actions} == set(Action)


@given(
    st.sampled_from(sorted(FAULT_POINTS)),
    st.data(),
    st.none() | st.integers(0, 99),
    st.integers(0, 99),
    st.none() | st.sampled_from(["decode", "long-1"]),
)
def test_a_rule_is_written_as_it_is_read(
    point: str, data: st.DataObject, times: int | None, skip: int, pool: str | None
) -> None:
    action = data.draw(st.sampled_from(FAULT_POINTS[point].actions))
    value = data.draw(st.sampled_from([0.25, 2.0, 50.0])) if action in VALUE_UNITS else None
    rule = FaultRule(point=point, action=action, value=value, times=times, skip=skip, pool=pool)

    assert parse_faults(str(rule)) == (rule,)
