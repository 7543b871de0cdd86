"""Draws that depend on request, choice and position alone, and the filters before them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Row
from engine.sampler import sample, uniform
from messages.requests import RequestId, SamplingParams


def make_row(params: SamplingParams, *, end: int = 10, choice: int = 0, request_id: str = "r") -> Row:
    return Row(
        request_id=RequestId(request_id),
        token_ids=(1,),
        start=end - 1,
        block_ids=((),),
        sampling=params,
        choice=choice,
    )


def random_logits(rows: int, vocab: int = 200, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.5]),
    top_k=st.sampled_from([0, 1, 5, 500]),
    seed=st.integers(-5, 2**63),
)


@settings(max_examples=50, deadline=None)
@given(params=st.lists(PARAMS, min_size=1, max_size=8))
def test_a_row_draws_the_same_alone_and_in_a_batch(params: list[SamplingParams]) -> None:
    rows = [make_row(p, end=number + 1, choice=number % 3) for number, p in enumerate(params)]
    logits = random_logits(len(rows))

    batched = sample(logits, rows)

    assert batched == [sample(logits[number : number + 1], [row])[0] for number, row in enumerate(rows)]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), temperature=st.floats(1e-6, 5.0))
def test_one_candidate_is_greedy(seed: int, temperature: float) -> None:
    logits = random_logits(2, seed=seed)
    best = logits.argmax(-1).tolist()
    one = SamplingParams(max_tokens=1, temperature=temperature, top_k=1, seed=seed)

    assert sample(logits, [make_row(one)] * 2) == best
    assert sample(logits, [make_row(replace(one, top_k=0, top_p=1e-9))] * 2) == best


def test_equal_logits_give_the_lowest_id_greedily_and_with_one_candidate() -> None:
    logits = torch.zeros(1, 50)
    logits[0, [7, 30]] = 5.0

    assert sample(logits, [make_row(SamplingParams(max_tokens=1, temperature=0.0))]) == [7]
    assert sample(logits, [make_row(SamplingParams(max_tokens=1, top_k=1, seed=3))]) == [7]


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    params = SamplingParams(max_tokens=1, seed=11)
    rows = [make_row(params, end=position) for position in range(1, 4001)]

    counts = torch.bincount(torch.tensor(sample(probabilities.log().expand(4000, 4), rows)), minlength=4) / 4000

    assert (counts - probabilities).abs().max() < 0.03


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"), [(2, 1.0, {0, 1}), (0, 0.79, {0, 1}), (0, 0.81, {0, 1, 2}), (2, 0.6, {0})]
)
def test_top_k_then_top_p_bound_what_is_drawn(top_k: int, top_p: float, kept: set[int]) -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    params = SamplingParams(max_tokens=1, top_k=top_k, top_p=top_p, seed=1)

    drawn = {sample(logits, [make_row(params, end=position)])[0] for position in range(1, 200)}

    assert drawn == kept


def test_a_wide_nucleus_in_a_large_vocabulary_is_filtered_exactly() -> None:
    vocab = 5000
    logits = torch.linspace(0.0, 0.1, vocab)[torch.randperm(vocab, generator=torch.Generator().manual_seed(2))][None]
    shares, order = logits[0].double().softmax(-1).sort(descending=True)
    allowed = set(order[(shares.cumsum(0) - shares) < 0.5].tolist())
    params = SamplingParams(max_tokens=1, top_p=0.5, seed=4)

    drawn = sample(logits.expand(400, vocab), [make_row(params, end=position) for position in range(400)])

    assert set(drawn) <= allowed
    assert len(set(drawn)) > 300


def test_random_numbers_differ_by_seed_choice_and_position_and_repeat_otherwise() -> None:
    params = SamplingParams(max_tokens=1, seed=5)
    variants = [
        make_row(params),
        make_row(params, end=11),
        make_row(params, choice=1),
        make_row(replace(params, seed=6)),
        make_row(replace(params, seed=None)),
        make_row(replace(params, seed=None), request_id="other"),
    ]

    numbers = [uniform(row) for row in variants]

    assert len(set(numbers)) == len(numbers)
    assert numbers == [uniform(row) for row in variants]
    assert all(0.0 <= number < 1.0 for number in numbers)


def test_a_tiny_temperature_does_not_overflow() -> None:
    logits = random_logits(1) * 100

    assert sample(logits, [make_row(SamplingParams(max_tokens=1, temperature=1e-30, seed=1))]) == [int(logits.argmax())]
