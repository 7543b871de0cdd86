from collections import Counter

import pytest

from benchmarks.turns import Done, Side, rate_of


def side(operations: int, calls: Counter[str]) -> Side:
    made = Side()
    made.add([Done(operations=operations, elapsed_s=2.0, latencies_s=(0.1,) * operations)], calls)
    return made


def test_clients_that_run_side_by_side_add_up() -> None:
    done = [Done(operations=10, elapsed_s=2.0), Done(operations=30, elapsed_s=3.0)]

    assert rate_of(done) == pytest.approx(15.0)


def test_the_rate_of_a_side_is_the_median_of_its_turns() -> None:
    made = Side()
    for operations in (10, 1000, 20):
        made.add([Done(operations=operations, elapsed_s=1.0)], Counter())

    assert made.rate == 20.0


def test_sides_that_differ_only_in_how_often_they_ran_did_the_same() -> None:
    ours = side(100, Counter(hgetall=4000, evalsha=100))
    bare = side(300, Counter(hgetall=12_100, evalsha=300))

    ours.check_same_commands(bare)


@pytest.mark.parametrize("calls", [Counter(hgetall=10_000, evalsha=300), Counter(hgetall=12_000), Counter()])
def test_a_side_that_spares_itself_commands_is_found_out(calls: Counter[str]) -> None:
    ours = side(100, Counter(hgetall=4000, evalsha=100))

    with pytest.raises(RuntimeError, match="per operation"):
        ours.check_same_commands(side(300, calls))
