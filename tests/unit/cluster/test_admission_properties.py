"""Whatever happens in an admission, its sums hold and nobody is lost: rules 16 and 19, case 68."""

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cluster.admission_door import RULES, Door

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.integers(1, 200), st.integers(-1, 1), st.none() | st.floats(0.1, 20.0)),
        st.tuples(st.just("leave"), st.integers(0, 60)),
        st.tuples(st.just("wait"), st.floats(0.0, 8.0)),
        st.tuples(st.just("budget"), st.sampled_from([0, 50, 100, 200])),
        st.tuples(st.just("expire")),
    ),
    max_size=60,
)


@given(OPERATIONS)
def test_everybody_is_in_one_place_and_every_bound_holds(operations: list[tuple[object, ...]]) -> None:
    """Rules 16 and 19: the sums equal the requests inside, nobody is told twice, and in the end nothing is left."""
    door = Door()
    tokens: dict[str, int] = {}
    left: set[str] = set()
    budget = 100
    for operation in operations:
        match operation:
            case ("enter", int(size), int(priority), timeout):
                name = str(len(tokens))
                tokens[name] = size
                door.enter(name, size, priority, timeout)  # type: ignore[arg-type]
            case ("leave", int(number)):
                door.leave(str(number))
                left |= {str(number)} & tokens.keys()
            case ("wait", float(seconds)):
                door.clock.now_s += seconds
            case ("budget", int(size)):
                door.note(door.admission.set_budget(size))
                budget = size
            case _:
                door.note(door.admission.expire())
        inside = tokens.keys() - left - door.refused.keys()
        running, running_tokens, waiting, waiting_tokens = door.gauges()
        assert running == len(inside & set(door.begun))
        assert running_tokens == sum(tokens[name] for name in inside & set(door.begun))
        assert waiting_tokens == sum(tokens[name] for name in inside - set(door.begun))
        assert running + waiting <= RULES.max_requests
        assert waiting <= 1 or waiting_tokens <= 1000
        assert budget > 0 or waiting == 0
    door.leave(*tokens)

    assert door.gauges() == (0, 0, 0, 0)


@given(st.lists(st.tuples(st.integers(1, 200), st.floats(0.0, 3.0)), min_size=1, max_size=40))
def test_what_runs_together_fits_the_budget(requests: list[tuple[int, float]]) -> None:
    door = Door()
    for number, (size, pause_s) in enumerate(requests):
        door.enter(str(number), size)
        door.clock.now_s += pause_s
        running, running_tokens, waiting, _ = door.gauges()
        assert running_tokens <= 100 or running == 1
        # Nobody waits before an empty budget.
        assert running > 0 or waiting == 0
        if number % 3 == 2:
            door.leave(door.begun[number // 3])
