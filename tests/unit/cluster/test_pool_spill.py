"""When requests go to the pools of others: rule 17, spill-over both ways with hysteresis."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.pools import PoolSpec
from tests.unit.cluster.board_bench import LARGE_KV, LONG, POOLS, RULES, SHORT, SMALL_KV, UNIFIED, Bench


@pytest.mark.parametrize(("queued", "allowed"), [(7999, [SHORT]), (8000, [SHORT, LONG])])
def test_short_requests_may_go_to_the_long_pool_from_the_mark_on(queued: int, allowed: list[int]) -> None:
    bench = Bench()

    bench.load(queued, queued)

    assert bench.allowed(200) == allowed


def test_long_requests_may_go_to_the_short_pool_when_they_fit_there() -> None:
    """Rule 17: both ways, but not so that the short pool would be over itself."""
    bench = Bench()

    bench.load(0, 0, 80_000, 80_000)

    assert bench.allowed(15_999) == [SHORT, LONG]
    assert bench.allowed(16_000) == [LONG]
    assert bench.decide(15_999).reason == "over"
    assert bench.decide(16_000).reason == "own"


@pytest.mark.parametrize(("short_queues", "allowed"), [((0, 0), [SHORT, LONG]), ((0, 1), [LONG]), ((1, 0), [LONG])])
def test_a_long_request_goes_to_shorter_ones_only_while_most_workers_there_are_idle(
    short_queues: tuple[int, int], allowed: list[int]
) -> None:
    """One long prompt must not make short ones late: the other worker is theirs."""
    bench = Bench()

    bench.load(*short_queues, 80_000, 80_000)

    assert bench.allowed(3000) == allowed


@pytest.mark.parametrize(("num_busy", "allowed"), [(1, [SHORT, LONG]), (2, [LONG])])
def test_half_of_the_workers_of_shorter_ones_stay_theirs(num_busy: int, allowed: list[int]) -> None:
    bench = Bench(workers=np.array([SHORT, SHORT, SHORT, SHORT, LONG]))

    bench.load(*[1] * num_busy, *[0] * (4 - num_busy), 80_000)

    assert bench.allowed(3000) == allowed


def test_a_long_request_never_takes_the_only_worker_of_shorter_ones() -> None:
    bench = Bench(workers=np.array([SHORT, LONG, LONG]))

    bench.load(0, 80_000, 80_000)

    assert bench.allowed(3000) == [LONG]


def test_a_short_request_may_go_to_a_single_busy_worker_of_longer_ones() -> None:
    bench = Bench(workers=np.array([SHORT, SHORT, LONG]))

    bench.load(9000, 9000, 50_000)

    assert bench.allowed(200) == [SHORT, LONG]


def test_a_decode_is_no_burden_where_others_compute_its_prompt() -> None:
    bench = Bench((replace(UNIFIED[0], max_context_tokens=8192), *POOLS[1:]), np.array([0, LONG, LARGE_KV]))

    bench.load(500, 0, 0, free=(90_000, 0, 10_000))

    assert bench.allowed(9000, 9000, "decode") == [0, LARGE_KV]


def test_unified_workers_alone_protect_their_short_requests_too() -> None:
    bench = Bench(UNIFIED, np.array([0, 0, 1]))

    bench.load(0, 1, 90_000)
    busy = bench.allowed(3000, 3000, "decode")
    bench.load(0, 0, 90_000)

    assert busy == [1]
    assert bench.allowed(3000, 3000, "decode") == [0, 1]


def test_a_pool_stays_over_until_it_has_come_down_to_the_lower_mark() -> None:
    bench = Bench()

    bench.load(8000, 8000)
    bench.load(5001, 5001)
    still = bench.allowed(200)
    bench.load(5000, 5000)

    assert still == [SHORT, LONG]
    assert bench.allowed(200) == [SHORT]
    assert [state.num_switches for state in bench.board.states()] == [2, 0, 0, 0]


def test_nothing_spills_into_a_pool_that_is_over_itself() -> None:
    bench = Bench()

    bench.load(9000, 9000, 80_000, 80_000)

    assert bench.allowed(200) == [SHORT]
    assert bench.allowed(9000) == [LONG]


def test_a_pool_that_was_over_takes_nothing_from_others_until_it_has_come_down() -> None:
    bench = Bench()

    bench.load(9000, 9000, 80_000, 80_000)
    bench.load(9000, 9000, 60_000, 60_000)

    assert bench.allowed(200) == [SHORT]


def test_what_belongs_to_two_pools_spills_when_both_are_over() -> None:
    bench = Bench((*POOLS[:2], PoolSpec(name="any", role="prefill", max_queue_tokens=10_000)), np.array([0, 1, 2]))

    bench.load(9000, 0, 100)
    one_is_over = bench.allowed(200)
    bench.load(9000, 0, 9000)

    assert one_is_over == [0, 2]
    assert bench.allowed(200) == [0, 1, 2]


def test_the_queues_of_workers_that_may_not_be_used_do_not_count() -> None:
    bench = Bench()
    bench.usable[1] = False

    bench.load(0, 10_000, 80_000, 80_000)

    assert bench.board.states()[SHORT].prefill_load == 0.0
    assert bench.allowed(200) == [SHORT]


def test_one_endless_queue_does_not_fill_a_pool() -> None:
    bench = Bench()

    bench.load(10**9, 0)

    assert bench.allowed(200) == [SHORT]
    assert bench.board.states()[SHORT].prefill_load == 0.5


def test_without_a_line_a_queue_is_measured_in_seconds() -> None:
    pools = tuple(replace(pool, max_queue_tokens=None) for pool in POOLS)
    slow, fast = Bench(pools), Bench(pools)

    slow.load(4000, 4000, rate=500.0)
    fast.load(4000, 4000, rate=5000.0)

    assert slow.allowed(200) == [SHORT, LONG]
    assert fast.allowed(200) == [SHORT]


def test_kv_that_is_used_up_sends_decodes_to_the_other_pool() -> None:
    bench = Bench()

    bench.load(free=(0, 0, 0, 0, 20_000, 50_000))

    assert bench.allowed(100, 100, "decode") == [SMALL_KV, LARGE_KV]
    assert bench.allowed(100, 30_000, "decode") == [LARGE_KV]


def test_queues_count_where_unified_workers_decode() -> None:
    bench = Bench(UNIFIED, np.array([0, 1]))

    bench.load(8000, 0)

    assert bench.allowed(100, 100, "decode") == [0, 1]


@given(loads=st.lists(st.floats(0.0, 1.0), min_size=2, max_size=80), step_s=st.floats(0.01, 5.0))
def test_a_state_holds_for_its_time_and_changes_at_the_marks_only(loads: list[float], step_s: float) -> None:
    """Rule 17, hysteresis."""
    bench = Bench()
    changes: list[float] = []
    before = False
    for load in loads:
        bench.load(int(load * 10_000), int(load * 10_000))
        bench.clock.now_s += step_s - 2.0
        after = bench.board.states()[SHORT].is_over_prefill
        if after != before:
            changes.append(bench.clock.now_s)
            assert load >= 0.79 if after else load <= 0.51
        before = after

    assert all(later - earlier >= RULES.hold_s - 1e-6 for earlier, later in pairwise(changes))
    assert bench.board.states()[SHORT].num_switches == len(changes)
