"""Boundaries between short and long: equal loads in token-seconds, and no flapping (issue 5, rule 17)."""

import csv
import json
import math
import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.length_histogram import LengthHistogram
from cluster.thresholds import AdaptiveThresholds, FixedThresholds, ThresholdRules
from tests.unit.cluster.pool_clock import Clock

TRACES = Path(__file__).resolve().parents[4] / "shared" / "traces"
"""Public traces beside the repository, where somebody has put them."""

RULES = ThresholdRules(min_requests=200.0, half_life_s=600.0, hold_s=60.0)


def lognormal(mu: float, sigma: float, count: int, seed: int) -> list[int]:
    generator = random.Random(seed)  # noqa: S311 - not for secrets
    return [max(1, round(generator.lognormvariate(mu, sigma))) for _ in range(count)]


def bimodal(count: int, seed: int) -> list[int]:
    """Nine chats of about 300 tokens to one document of about 12,000."""
    generator = random.Random(seed)  # noqa: S311 - not for secrets
    modes = [(math.log(300), 0.5)] * 9 + [(math.log(12_000), 0.3)]
    return [max(1, round(generator.lognormvariate(*generator.choice(modes)))) for _ in range(count)]


def seconds_each(tokens: int) -> float:
    """A model of compute: 0.1 ms a token, and twice that at 50,000 tokens of context."""
    return 1e-4 * (1 + tokens / 50_000)


def loads_per_capacity(lengths: list[int], boundaries: tuple[int, ...], capacities: list[float]) -> list[float]:
    """Exact loads of the ranges in token-seconds, per capacity; 1 where all are equal."""
    loads = [0.0] * len(capacities)
    for tokens in lengths:
        loads[sum(tokens > boundary for boundary in boundaries)] += tokens * seconds_each(tokens)
    return [load / capacity * sum(capacities) / sum(loads) for load, capacity in zip(loads, capacities, strict=True)]


def adapted(
    lengths: list[int], capacities: list[float], start: tuple[int, ...] = (2048,), interval_s: float = 0.05
) -> tuple[AdaptiveThresholds, int]:
    """Thresholds that have seen `lengths` one after another, and how often they moved."""
    clock = Clock()
    thresholds = AdaptiveThresholds(start, RULES, clock)
    num_moves = 0
    for tokens in lengths:
        clock.now_s += interval_s
        thresholds.observe(tokens, seconds_each(tokens))
        num_moves += thresholds.adapt(capacities)
    return thresholds, num_moves


@pytest.mark.parametrize("capacities", [[1.0, 1.0], [3.0, 1.0], [1.0, 4.0]])
@pytest.mark.parametrize(
    "lengths", [bimodal(20_000, seed=1), lognormal(7.0, 1.36, 20_000, seed=2)], ids=["bimodal", "lognormal"]
)
def test_pools_come_to_carry_equal_loads_for_what_they_can(lengths: list[int], capacities: list[float]) -> None:
    thresholds, num_moves = adapted(lengths, capacities, start=(100,))

    assert num_moves >= 1
    assert loads_per_capacity(lengths, thresholds.boundaries, capacities) == pytest.approx([1, 1], abs=0.25)
    # Far from what equal numbers of requests would give.
    assert thresholds.boundaries[0] > sorted(lengths)[len(lengths) // 2]


def test_three_ranges_share_alike() -> None:
    lengths = lognormal(7.0, 1.2, 20_000, seed=3)
    capacities = [1.0, 2.0, 1.0]

    thresholds, _ = adapted(lengths, capacities, start=(100, 200))

    assert loads_per_capacity(lengths, thresholds.boundaries, capacities) == pytest.approx([1, 1, 1], abs=0.25)


def trace(name: str) -> list[int]:
    """Prompt lengths of a public trace, in their order."""
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"no {name} in {TRACES.name}")
    with path.open(encoding="utf-8") as lines:
        if path.suffix == ".csv":
            return [max(1, int(row["ContextTokens"])) for row in csv.DictReader(lines)]
        return [max(1, int(json.loads(line)["input_length"])) for line in lines]


@pytest.mark.parametrize(
    "name",
    [
        "azure2023_code.csv",
        "azure2023_conv.csv",
        "mooncake_conversation_trace.jsonl",
        "mooncake_synthetic_trace.jsonl",
    ],
)
def test_pools_come_to_carry_equal_loads_of_public_traces(name: str) -> None:
    lengths = trace(name)
    capacities = [2.0, 2.0]

    thresholds, num_moves = adapted(lengths, capacities, interval_s=0.2)

    recent = lengths[-6000:]
    before = loads_per_capacity(recent, (2048,), capacities)
    after = loads_per_capacity(recent, thresholds.boundaries, capacities)
    assert after == pytest.approx([1, 1], abs=0.15)
    assert abs(after[0] - 1) < abs(before[0] - 1)
    assert num_moves <= len(lengths) * 0.2 / RULES.hold_s / 4


def test_lengths_that_stay_as_they_are_move_the_boundary_a_few_times_only() -> None:
    """Hysteresis: noise of a steady load moves nothing, though a boundary without it would move each time."""
    lengths = lognormal(7.0, 1.36, 40_000, seed=4)
    clock = Clock()
    thresholds = AdaptiveThresholds((2048,), RULES, clock)
    eager = AdaptiveThresholds(
        (2048,), ThresholdRules(tolerance=0.0, num_deviations=0.0, min_requests=200.0, hold_s=60.0), clock
    )
    moves = {"calm": 0, "eager": 0}
    for tokens in lengths:
        clock.now_s += 0.2
        thresholds.observe(tokens)
        eager.observe(tokens)
        moves["calm"] += thresholds.adapt([1.0, 1.0])
        moves["eager"] += eager.adapt([1.0, 1.0])

    assert 1 <= moves["calm"] <= 4
    assert moves["eager"] > 20 * moves["calm"]


def test_a_boundary_follows_when_the_lengths_change() -> None:
    clock = Clock()
    thresholds = AdaptiveThresholds((2048,), RULES, clock)
    settled: list[int] = []
    for mu in (6.0, 9.0):
        for tokens in lognormal(mu, 1.0, 20_000, seed=5):
            clock.now_s += 0.2
            thresholds.observe(tokens)
            thresholds.adapt([1.0, 1.0])
        settled.append(thresholds.boundaries[0])

    # Half of a lognormal load lies below exp(mu + sigma ** 2).
    assert settled == pytest.approx([math.exp(7.0), math.exp(10.0)], rel=0.25)


def test_nothing_moves_before_enough_was_seen() -> None:
    _, num_moves = adapted(lognormal(9.0, 0.5, 199, seed=6), [1.0, 1.0])
    _, num_later = adapted(lognormal(9.0, 0.5, 250, seed=6), [1.0, 1.0])

    assert (num_moves, num_later) == (0, 1)


def test_what_has_faded_is_no_evidence() -> None:
    clock = Clock()
    thresholds = AdaptiveThresholds((2048,), RULES, clock)
    for tokens in lognormal(9.0, 0.5, 1000, seed=6):
        thresholds.observe(tokens)

    clock.now_s += 3 * RULES.half_life_s

    assert not thresholds.adapt([1.0, 1.0])


def test_a_few_huge_requests_are_no_evidence() -> None:
    clock = Clock()
    thresholds = AdaptiveThresholds((2048,), RULES, clock)
    for tokens in [100] * 1000 + [200_000] * 2:
        thresholds.observe(tokens)

    assert thresholds.loads([1.0, 1.0]) == pytest.approx([0.4, 1.6])
    assert not thresholds.adapt([1.0, 1.0])


def test_a_pool_without_workers_moves_nothing() -> None:
    thresholds, num_moves = adapted(bimodal(2000, seed=7), [1.0, 0.0])

    assert (thresholds.boundaries, num_moves) == ((2048,), 0)


def test_boundaries_stay_for_their_time() -> None:
    clock = Clock()
    thresholds = AdaptiveThresholds((2048,), RULES, clock)
    moved_s: list[float] = []
    for step in range(5000):
        clock.now_s += 0.1
        # The load swings between two lengths, so that the best boundary is never the present one for long.
        thresholds.observe(500 if step // 500 % 2 else 50_000)
        if thresholds.adapt([1.0, 1.0 + step // 500 % 2 * 50]):
            moved_s.append(clock.now_s)

    assert len(moved_s) >= 2
    assert min(later - earlier for earlier, later in pairwise(moved_s)) >= RULES.hold_s - 1e-6


def test_fixed_boundaries_stay_whatever_is_seen() -> None:
    thresholds = FixedThresholds([256, 4096])
    for tokens in bimodal(1000, seed=8):
        thresholds.observe(tokens)

    assert not thresholds.adapt([1.0, 1.0, 1.0])
    assert thresholds.boundaries == (256, 4096)


@given(
    lengths=st.lists(st.integers(1, 2**26), min_size=1, max_size=60),
    seconds=st.floats(1e-6, 1e3),
    start=st.lists(st.integers(1, 10**6), min_size=1, max_size=4, unique=True).map(sorted),
    capacity=st.floats(0.1, 10.0),
)
def test_boundaries_are_always_ascending_and_at_least_one(
    lengths: list[int], seconds: float, start: list[int], capacity: float
) -> None:
    clock = Clock()
    thresholds = AdaptiveThresholds(start, ThresholdRules(min_requests=1.0, num_deviations=0.0), clock)
    for tokens in lengths:
        clock.now_s += 100.0
        thresholds.observe(tokens, seconds)
        thresholds.adapt([capacity, *[1.0] * len(start)])

    assert thresholds.boundaries[0] >= 1
    assert all(low < high for low, high in pairwise(thresholds.boundaries))
    assert len(thresholds.boundaries) == len(start)


REQUESTS = st.lists(st.tuples(st.integers(1, 2**23), st.floats(0.001, 100.0)), min_size=1, max_size=50)


@given(requests=REQUESTS, boundary=st.integers(1, 2**23))
def test_shares_are_those_of_the_lengths_up_to_the_width_of_a_bin(
    requests: list[tuple[int, float]], boundary: int
) -> None:
    histogram = LengthHistogram(600.0, 0.0)
    for tokens, load in requests:
        histogram.add(tokens, load, 0.0)
    total = sum(load for _, load in requests)
    width = 2 ** (1 / 32)

    below, above = histogram.shares((boundary,))

    assert below + above == pytest.approx(1.0)
    assert sum(load for tokens, load in requests if tokens <= boundary / width - 1) / total <= below + 1e-9
    assert sum(load for tokens, load in requests if tokens <= (boundary + 1) * width) / total >= below - 1e-9


def test_the_past_fades_by_half_and_the_sums_never_overflow() -> None:
    histogram = LengthHistogram(1.0, 0.0)
    for second in range(5000):
        histogram.add(100 if second < 4998 else 10_000, 1.0, float(second))

    # 1 + 1/2 of the long ones against 1/4 + 1/8 + ... of the short ones.
    assert histogram.count(4999.0) == pytest.approx(2.0)
    assert histogram.shares((1000,)) == pytest.approx([0.25, 0.75])


def test_few_large_requests_count_as_few() -> None:
    even, uneven = LengthHistogram(600.0, 0.0), LengthHistogram(600.0, 0.0)
    for number in range(100):
        even.add(100, 1.0, 0.0)
        uneven.add(100, 1000.0 if number == 0 else 1.0, 0.0)

    assert even.effective_count == pytest.approx(100.0)
    assert uneven.effective_count < 1.3


def test_what_is_uncertain_fades_with_the_rest() -> None:
    histogram = LengthHistogram(1.0, 0.0)
    for now_s in (0.0, 100.0):
        for _ in range(10):
            histogram.add(100, 1.0, now_s)

    assert histogram.effective_count == pytest.approx(10.0)


def test_a_boundary_inside_a_bin_cuts_it_evenly() -> None:
    histogram = LengthHistogram(600.0, 0.0)
    for tokens in range(10_000, 20_000):
        histogram.add(tokens, 1.0, 0.0)

    assert histogram.shares((14_999,)) == pytest.approx([0.5, 0.5], abs=0.001)
    assert histogram.shares((14_899, 15_099)) == pytest.approx([0.49, 0.02, 0.49], abs=0.001)
