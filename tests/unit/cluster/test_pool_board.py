"""Which pools may take a request, and what is said when none may: rules 17 and 19, case 64."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.pool_board import Allowance, Kind
from cluster.pools import with_boundaries
from messages.errors import Unavailable
from tests.unit.cluster.board_bench import LARGE_KV, LONG, POOLS, RULES, SHORT, SMALL_KV, UNIFIED, WORKERS, Bench


@pytest.mark.parametrize(("remaining", "pool"), [(1, SHORT), (2048, SHORT), (2049, LONG), (100_000, LONG)])
def test_a_prefill_belongs_to_the_pool_of_its_uncached_tokens(remaining: int, pool: int) -> None:
    assert Bench().allowed(remaining) == [pool]


@pytest.mark.parametrize(("context", "pool"), [(1, SMALL_KV), (8192, SMALL_KV), (8193, LARGE_KV)])
def test_a_decode_belongs_to_the_pool_of_its_whole_context(context: int, pool: int) -> None:
    assert Bench().allowed(1, context, "decode") == [pool]


def test_what_is_cached_makes_a_long_prompt_short_for_prefill_and_leaves_it_long_for_kv() -> None:
    """Rule 17, case 64: by the tokens that are left on each worker, not by the length of the prompt."""
    bench = Bench()

    cold = bench.decide([20_000] * 6, 20_000)
    warm_everywhere = bench.decide([500] * 6, 20_000)
    warm_on_one = bench.decide([20_000, 500, 20_000, 20_000, 20_000, 20_000], 20_000)

    assert np.flatnonzero(cold.mask).tolist() == [2, 3]
    assert np.flatnonzero(warm_everywhere.mask).tolist() == [0, 1]
    assert np.flatnonzero(warm_on_one.mask).tolist() == [1, 2, 3]
    assert bench.allowed(500, 20_000, "decode") == [LARGE_KV]


def test_a_unified_pool_alone_takes_a_decode_by_both_its_ranges() -> None:
    bench = Bench(UNIFIED, np.array([0, 1]))

    assert bench.allowed(2048, 2048, "decode") == [0]
    assert bench.allowed(2049, 2049, "decode") == [1]
    assert bench.allowed(500, 20_000, "decode") == [0]


def test_a_unified_pool_beside_prefill_pools_may_decode_what_those_compute() -> None:
    bench = Bench((*UNIFIED, POOLS[LONG]), np.array([0, 1, 2]))

    assert bench.allowed(500, 500, "decode") == bench.allowed(20_000, 20_000, "decode") == [0, 1]


@pytest.mark.parametrize(("remaining", "dead", "other"), [(200, SHORT, LONG), (20_000, LONG, SHORT)])
def test_a_pool_without_a_healthy_worker_spills_whatever_its_size(remaining: int, dead: int, other: int) -> None:
    """Rule 17: it must not hang; here the other pool could not even hold the request below its mark."""
    bench = Bench()
    bench.usable = np.array([worker != dead for worker in WORKERS])

    bench.load()

    assert bench.allowed(remaining) == [other]
    assert bench.decide(remaining).reason == "dead"


def test_of_the_other_pools_it_goes_to_one_that_is_not_over() -> None:
    pools = (POOLS[0], replace(POOLS[1], max_prefill_tokens=9999), replace(POOLS[1], min_prefill_tokens=10_000))
    bench = Bench(pools, np.array([0, 1, 2]))
    bench.usable[0] = False

    bench.load(0, 90_000, 100)

    assert bench.allowed(200) == [2]


def test_it_spills_into_a_pool_that_is_over_when_there_is_no_better() -> None:
    bench = Bench()
    bench.usable = np.array([worker != SHORT for worker in WORKERS])

    bench.load(0, 0, 90_000, 90_000)

    assert bench.allowed(200) == [LONG]


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_without_any_healthy_worker_the_answer_is_unavailable_at_once(kind: Kind) -> None:
    bench = Bench()
    bench.usable &= WORKERS >= SMALL_KV if kind == "prefill" else WORKERS < SMALL_KV

    with pytest.raises(Unavailable, match=f"no {kind} worker") as caught:
        bench.decide(200, kind=kind, waited_s=99.0)

    assert caught.value.context["retry_after_s"] == 0.5


def test_when_every_queue_is_full_the_answer_is_unavailable_with_the_time_to_drain() -> None:
    """Rule 19. The shortest queue of 10,000 must come down to 5,000 at 1,000 a second."""
    bench = Bench()

    bench.load(12_000, 10_000, 100_000, 100_000)

    with pytest.raises(Unavailable, match="are full") as caught:
        bench.decide(200)
    assert caught.value.context["retry_after_s"] == 5.0
    with pytest.raises(Unavailable):
        bench.decide(200, waited_s=99.0)


def test_one_worker_below_its_line_is_enough_to_be_taken() -> None:
    bench = Bench()

    bench.load(10_000, 9_999, 100_000, 100_000)

    assert bench.allowed(200) == [SHORT]


def test_a_full_pool_sends_on_what_fits_elsewhere_and_refuses_the_rest() -> None:
    bench = Bench()

    bench.load(0, 0, 100_000, 100_000)

    assert bench.allowed(10_000) == [SHORT]
    assert bench.decide(10_000).reason == "full"
    with pytest.raises(Unavailable):
        bench.decide(50_000)


@pytest.mark.parametrize(("waited_s", "allowed"), [(4.9, [LONG]), (5.0, [SHORT, LONG])])
def test_who_has_waited_for_half_of_the_limit_may_go_anywhere(waited_s: float, allowed: list[int]) -> None:
    bench = Bench()

    bench.load(0, 0, 90_000, 90_000)

    assert bench.allowed(50_000, waited_s=waited_s) == allowed


def test_rows_without_a_worker_are_never_allowed() -> None:
    bench = Bench(workers=np.array([-1, SHORT, -1, LONG, SMALL_KV]))

    bench.load()

    assert np.flatnonzero(bench.decide(200).mask).tolist() == [1]
    assert np.flatnonzero(bench.decide(200, waited_s=99.0).mask).tolist() == [1, 3]
    assert [state.num_workers for state in bench.board.states()] == [1, 1, 1, 0]


def test_new_ranges_move_requests_and_keep_what_is_over() -> None:
    bench = Bench()
    bench.load(9000, 9000)

    bench.board.replace_pools(with_boundaries(POOLS, [99]))

    assert bench.allowed(100) == [LONG]
    assert bench.allowed(99) == [SHORT, LONG]


def test_the_state_of_every_pool_can_be_told() -> None:
    bench = Bench()

    bench.load(9000, 8000, 10_000, 30_000, free=(0, 0, 0, 0, 75_000, 10_000))

    states = bench.board.states()
    assert [(state.name, state.num_workers) for state in states] == [
        ("short", 2),
        ("long", 2),
        ("small-kv", 1),
        ("large-kv", 1),
    ]
    assert [state.prefill_load for state in states[:2]] == pytest.approx([0.85, 0.2])
    assert [state.decode_load for state in states[2:]] == pytest.approx([0.25, 0.9])
    assert [state.is_over_prefill for state in states] == [True, False, False, False]
    assert [state.is_over_decode for state in states][2:] == [False, True]
    assert states[SHORT].prefill_tokens_s == 2000.0


@given(
    queued=st.lists(st.integers(0, 200_000), min_size=4, max_size=4),
    usable=st.lists(st.booleans(), min_size=6, max_size=6),
    remaining=st.lists(st.integers(1, 50_000), min_size=6, max_size=6),
    waited_s=st.floats(0.0, 20.0),
    kind=st.sampled_from(["prefill", "decode"]),
)
def test_somebody_is_allowed_or_it_says_so(
    queued: list[int], usable: list[bool], remaining: list[int], waited_s: float, kind: Kind
) -> None:
    """Rule 17: a request has a worker that can do the work and may be used, or an answer; it never hangs."""
    bench = Bench()
    bench.usable = np.array(usable)
    bench.load(*queued)
    able = bench.usable & (WORKERS < SMALL_KV if kind == "prefill" else WORKERS >= SMALL_KV)

    outcome: Allowance | Unavailable
    try:
        outcome = bench.decide(remaining, kind=kind, waited_s=waited_s)
    except Unavailable as error:
        outcome = error

    if isinstance(outcome, Unavailable):
        assert outcome.context["retry_after_s"] >= RULES.min_retry_s  # type: ignore[operator]
        # Queues have a line here, KV has none.
        assert kind == "prefill" or not able.any()
    else:
        assert outcome.mask.any()
        assert not (outcome.mask & ~able).any()
        assert not (outcome.own & ~outcome.mask).any()
