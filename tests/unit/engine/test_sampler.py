"""Draws that depend on request, choice and position alone, and the filters before them."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from engine.batch import Row
from engine.sampler import sample, uniform
from messages.requests import SamplingParams
from tests.unit.engine.sampled_rows import ROWS, make_row, random_logits, tokens, tokens_of


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(ROWS, min_size=1, max_size=8), seed=st.integers(0, 1000))
def test_a_row_gets_the_same_alone_and_in_a_batch(rows: list[Row], seed: int) -> None:
    logits = random_logits(len(rows), seed=seed)

    batched = sample(logits, rows)

    assert batched == [sample(logits[number : number + 1], [row])[0] for number, row in enumerate(rows)]


@settings(max_examples=12, deadline=None)
@given(
    filters=st.lists(
        st.tuples(st.sampled_from([0, 3, 1025, 1500, 2900]), st.sampled_from([1.0, 0.999, 0.9, 0.3])),
        min_size=2,
        max_size=5,
    )
)
def test_filters_wider_than_the_candidates_do_not_depend_on_batch_mates(filters: list[tuple[int, float]]) -> None:
    # Nearly flat, with few different values: every boundary falls among equal logits.
    logits = (random_logits(len(filters), vocab=3000) / 20).bfloat16().float()
    rows = [
        make_row(SamplingParams(max_tokens=1, top_k=top_k, top_p=top_p, seed=number), choices=tuple(range(50)))
        for number, (top_k, top_p) in enumerate(filters)
    ]

    batched = tokens_of(logits, rows)

    assert batched == [tokens_of(logits[number : number + 1], [row])[0] for number, row in enumerate(rows)]


@settings(max_examples=50, deadline=None)
@given(row=ROWS, seed=st.integers(0, 1000))
def test_every_choice_of_a_row_is_what_it_would_get_alone(row: Row, seed: int) -> None:
    logits = random_logits(1, seed=seed)

    together = sample(logits, [replace(row, choices=(0, 1, 2, 5))])[0]

    assert list(together) == [sample(logits, [replace(row, choices=(choice,))])[0][0] for choice in (0, 1, 2, 5)]


def test_choices_differ_when_drawn_and_are_equal_when_greedy() -> None:
    drawn = make_row(SamplingParams(max_tokens=1, temperature=2.0, seed=1), choices=tuple(range(20)))
    greedy = make_row(SamplingParams(max_tokens=1, temperature=0.0), choices=(0, 1, 2))
    logits = random_logits(2)

    of_drawn, of_greedy = tokens_of(logits, [drawn, greedy])

    assert len(set(of_drawn)) > 3
    assert of_greedy == [int(logits[1].argmax())] * 3


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), temperature=st.floats(1e-6, 5.0))
def test_one_candidate_is_greedy(seed: int, temperature: float) -> None:
    logits = random_logits(2, seed=seed)
    best = logits.argmax(-1).tolist()
    one = SamplingParams(max_tokens=1, temperature=temperature, top_k=1, seed=seed)

    assert tokens(logits, [make_row(one)] * 2) == best
    assert tokens(logits, [make_row(replace(one, top_k=0, top_p=1e-9))] * 2) == best


def test_equal_logits_give_the_lowest_id_greedily_and_with_one_candidate() -> None:
    logits = torch.zeros(1, 50)
    logits[0, [7, 30]] = 5.0

    assert tokens(logits, [make_row(SamplingParams(max_tokens=1, temperature=0.0))]) == [7]
    assert tokens(logits, [make_row(SamplingParams(max_tokens=1, top_k=1, seed=3))]) == [7]


def chi_square(drawn: list[int], probabilities: torch.Tensor) -> float:
    """Sum over the possible tokens; impossible ones must not be drawn."""
    counts = torch.bincount(torch.tensor(drawn), minlength=len(probabilities)).double()
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible].double() * len(drawn)
    return float(((counts[possible] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=1, temperature=0.7),
        SamplingParams(max_tokens=1, temperature=1.5, top_k=12),
        SamplingParams(max_tokens=1, top_p=0.9),
        SamplingParams(max_tokens=1, temperature=1.3, min_p=0.05),
        SamplingParams(max_tokens=1, temperature=1.2, top_k=30, top_p=0.95, min_p=0.02),
    ],
    ids=["plain", "temperature", "top-k", "top-p", "min-p", "all"],
)
def test_draws_follow_the_distribution_that_transformers_would_draw_from(params: SamplingParams) -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(3)) * 1.5
    scores = TemperatureLogitsWarper(params.temperature)(None, logits)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1.0:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    probabilities = scores.softmax(-1)[0]

    by_position = [make_row(replace(params, seed=11), end=position) for position in range(1, 5001)]
    by_choice = make_row(replace(params, seed=12), choices=tuple(range(5000)))
    drawn = tokens(logits.expand(5000, 40), by_position) + tokens_of(logits, [by_choice])[0]

    freedom = int((probabilities > 0).sum()) - 1
    # The seeds are fixed; 5 standard deviations of the statistic itself.
    assert chi_square(drawn, probabilities) < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [
        (2, 1.0, 0.0, {0, 1}),
        (0, 0.79, 0.0, {0, 1}),
        (0, 0.81, 0.0, {0, 1, 2}),
        (2, 0.6, 0.0, {0}),
        (0, 1.0, 0.29, {0, 1, 2}),
        (0, 1.0, 0.31, {0, 1}),
        (0, 1.0, 1.0, {0}),
        # After min-p 0.31 the first token alone would have 0.625 of the mass.
        (0, 0.6, 0.31, {0, 1}),
    ],
)
def test_top_k_then_top_p_then_min_p_bound_what_is_drawn(
    top_k: int, top_p: float, min_p: float, kept: set[int]
) -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    params = SamplingParams(max_tokens=1, top_k=top_k, top_p=top_p, min_p=min_p, seed=1)

    drawn = set(tokens_of(logits, [make_row(params, choices=tuple(range(200)))])[0])

    assert drawn == kept


@pytest.mark.parametrize("top_k", [0, 1500, 4000])
def test_a_wide_nucleus_in_a_large_vocabulary_is_filtered_exactly(top_k: int) -> None:
    vocab = 5000
    logits = torch.linspace(0.0, 0.1, vocab)[torch.randperm(vocab, generator=torch.Generator().manual_seed(2))][None]
    shares, order = logits[0].double().softmax(-1).sort(descending=True)
    shares = shares[: top_k or vocab] / shares[: top_k or vocab].sum()
    allowed = order[: len(shares)][(shares.cumsum(0) - shares) < 0.5].tolist()
    params = SamplingParams(max_tokens=1, top_k=top_k, top_p=0.5, seed=4)

    drawn = tokens_of(logits, [make_row(params, choices=tuple(range(5000)))])[0]

    assert set(drawn) <= set(allowed)
    # The least likely of them are drawn too.
    assert set(drawn) & set(allowed[-50:])


def test_random_numbers_differ_by_seed_choice_and_position_and_repeat_otherwise() -> None:
    params = SamplingParams(max_tokens=1, seed=5)
    variants = [
        (make_row(params), 0),
        (make_row(params, end=11), 0),
        (make_row(params), 1),
        (make_row(replace(params, seed=6)), 0),
        (make_row(replace(params, seed=None)), 0),
        (make_row(replace(params, seed=None), request_id="other"), 0),
    ]

    numbers = [uniform(row, choice) for row, choice in variants]

    assert len(set(numbers)) == len(numbers)
    assert numbers == [uniform(row, choice) for row, choice in variants]
    assert all(0.0 <= number < 1.0 for number in numbers)


@pytest.mark.parametrize("temperature", [1e-30, 1e-300])
def test_a_tiny_temperature_is_greedy_and_does_not_overflow(temperature: float) -> None:
    logits = random_logits(1) * 100

    row = make_row(SamplingParams(max_tokens=1, temperature=temperature, seed=1))

    assert tokens(logits, [row]) == [int(logits.argmax())]


def test_a_row_of_nan_does_not_disturb_its_batch_mates() -> None:
    logits = random_logits(3)
    logits[1] = float("nan")
    rows = [make_row(SamplingParams(max_tokens=1, seed=2, top_p=0.9, logprobs=2))] * 3

    batched = sample(logits, rows)

    assert [batched[0], batched[2]] == sample(logits[[0, 2]], [rows[0], rows[2]])
    assert 0 <= batched[1][0].token_ids[0] < logits.shape[-1]
