from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.reuse import (
    GroupBytes,
    Holder,
    ReuseRules,
    SourcePart,
    WorkerRates,
    assess_reuse,
    best_first,
    plan_reuse,
    price_tokens,
    split_sources,
)

RULES = ReuseRules(
    min_tokens=10, assumed_prefill_tokens_s=1000.0, assumed_transfer_bytes_s=1e6, overhead_s=0.1, margin=0.0
)
RATES = WorkerRates(groups=(GroupBytes(token_bytes=500),))
"""500 bytes at 1 MB/s: half of what computing a token takes; the overhead is worth 100 tokens."""


def holders(*tokens: int) -> list[Holder]:
    return best_first(Holder(worker_id=f"w{number}", num_tokens=held) for number, held in enumerate(tokens))


@pytest.mark.parametrize(("best", "verdict"), [(0, "nothing"), (199, "compute"), (200, "compute"), (201, "fetch")])
def test_a_prefix_is_fetched_just_above_the_price_of_computing_it(best: int, verdict: str) -> None:
    """At 200 tokens both ways cost 200: 100 for the bytes, 100 for the overhead."""
    assert assess_reuse(0, best, 1000, RATES, RULES).verdict == verdict


def test_what_is_here_is_neither_fetched_nor_counted() -> None:
    assert assess_reuse(300, 300, 1000, RATES, RULES).verdict == "nothing"
    assert assess_reuse(100, 300, 1000, RATES, RULES).gained_tokens == 200


def test_the_last_prompt_token_is_always_computed() -> None:
    assert assess_reuse(0, 500, 500, RATES, RULES).gained_tokens == 499
    assert assess_reuse(499, 500, 500, RATES, RULES).verdict == "nothing"


@pytest.mark.parametrize(("min_tokens", "verdict"), [(999, "fetch"), (1000, "compute")])
def test_a_fetch_must_bring_more_than_the_least(min_tokens: int, verdict: str) -> None:
    assert assess_reuse(0, 1000, 5000, RATES, replace(RULES, min_tokens=min_tokens)).verdict == verdict


def test_the_margin_weighs_on_bytes_and_overhead() -> None:
    assert price_tokens(RATES, replace(RULES, margin=0.5), 0, 1000) == pytest.approx(1.5 * 600)


def test_measured_rates_go_before_assumed_ones() -> None:
    measured = replace(RATES, prefill_tokens_s=10.0, transfer_bytes_s=1e9)

    assert assess_reuse(0, 11, 1000, measured, RULES).verdict == "fetch"
    assert assess_reuse(0, 900, 1000, replace(measured, prefill_tokens_s=1e6), RULES).verdict == "compute"


def test_a_window_costs_what_it_sees() -> None:
    windowed = WorkerRates(groups=(GroupBytes(token_bytes=500), GroupBytes(token_bytes=400, window=64)))

    assert windowed.bytes_between(0, 1000) == 500 * 1000 + 400 * 64
    assert windowed.bytes_between(980, 1000) == 900 * 20


@given(
    have=st.integers(0, 3000),
    best=st.integers(0, 3000),
    prompt=st.integers(1, 3000),
    prefill=st.floats(1.0, 1e6),
    transfer=st.floats(1e3, 1e12),
    window=st.one_of(st.none(), st.integers(1, 500)),
    margin=st.floats(0.0, 2.0),
)
def test_the_cost_is_continuous_in_what_everybody_holds(
    have: int, best: int, prompt: int, prefill: float, transfer: float, window: int | None, margin: float
) -> None:
    """Rule 18: one token more or less, here or there, changes the cost by about what a token costs, never by a jump."""
    rates = WorkerRates(
        prefill_tokens_s=prefill, transfer_bytes_s=transfer, groups=(GroupBytes(token_bytes=500, window=window),)
    )
    rules = replace(RULES, margin=margin)

    def cost(held: int, elsewhere: int) -> float:
        return max(1, prompt - held) - assess_reuse(held, elsewhere, prompt, rates, rules).saved_tokens

    here = cost(have, best)

    assert 0 < here <= max(1, prompt - have)
    assert abs(cost(have + 1, best) - here) <= 1.0 + 1e-6
    assert -1.0 - 1e-6 <= cost(have, best + 1) - here <= 1e-6 + (500 * (1 + margin) * prefill / transfer)


@given(
    have=st.integers(0, 500),
    best=st.integers(0, 3000),
    transfer=st.floats(1e4, 1e9),
    window=st.one_of(st.none(), st.integers(1, 500)),
)
def test_the_boundary_told_to_the_worker_is_where_fetching_begins_to_pay(
    have: int, best: int, transfer: float, window: int | None
) -> None:
    rates = WorkerRates(transfer_bytes_s=transfer, groups=(GroupBytes(token_bytes=500, window=window),))
    plan = plan_reuse(have, holders(best), 5000, rates, RULES)
    if plan.verdict != "fetch":
        assert plan.sources == ()
        return

    assert plan.sources == ("w0",)
    assert assess_reuse(best - plan.min_tokens, best, 5000, rates, RULES).verdict == "fetch"
    assert assess_reuse(best - plan.min_tokens + 1, best, 5000, rates, RULES).verdict in ("compute", "nothing")


def test_sources_come_best_first_and_the_less_loaded_of_equals() -> None:
    others = best_first(
        [
            Holder(worker_id="a", num_tokens=800, load=5.0),
            Holder(worker_id="b", num_tokens=900, load=9.0),
            Holder(worker_id="c", num_tokens=800, load=1.0),
            Holder(worker_id="d", num_tokens=50),
        ]
    )

    assert plan_reuse(100, others, 5000, RATES, RULES).sources == ("b", "c", "a")
    assert plan_reuse(100, others, 5000, RATES, replace(RULES, max_sources=2)).sources == ("b", "c")


@pytest.mark.parametrize(
    ("first", "held", "min_blocks", "parts"),
    [
        (0, [10], 1, [(0, 0, 10)]),
        (0, [10, 10], 1, [(1, 0, 5), (0, 5, 10)]),
        (0, [100, 10], 1, [(1, 0, 10), (0, 10, 100)]),
        (0, [12, 5], 1, [(1, 0, 5), (0, 5, 12)]),
        (4, [12, 4], 1, [(0, 4, 12)]),
        (0, [9, 9, 9], 1, [(2, 0, 3), (1, 3, 6), (0, 6, 9)]),
        (0, [9, 9, 9], 4, [(1, 0, 5), (0, 5, 9)]),
        (0, [9, 9], 10, [(0, 0, 9)]),
        (9, [9, 9], 1, []),
        (0, [], 1, []),
    ],
)
def test_parts_are_contiguous_and_as_even_as_the_sources_allow(
    first: int, held: list[int], min_blocks: int, parts: list[tuple[int, int, int]]
) -> None:
    expected = [SourcePart(source=source, first=start, end=end) for source, start, end in parts]

    assert split_sources(first, held, min_blocks) == expected


@given(first=st.integers(0, 50), held=st.lists(st.integers(0, 60), max_size=5), min_blocks=st.integers(1, 20))
def test_parts_cover_what_is_missing_once_and_only_with_what_their_source_holds(
    first: int, held: list[int], min_blocks: int
) -> None:
    parts = split_sources(first, held, min_blocks)

    covered = [block for part in parts for block in range(part.first, part.end)]
    assert covered == list(range(first, max([first, *held])))
    assert all(part.end <= held[part.source] for part in parts)
    assert len({part.source for part in parts}) == len(parts)
