"""Log probabilities of sampled tokens and of prompts are those of the model's own logits."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import logprobs
from engine.batch import Batch, Row, RowResult
from engine.logprobs import kept_places, token_logprobs
from engine.sampler import sample
from messages.requests import SamplingParams
from messages.tokens import TokenLogprob
from tests.unit.engine.sampled_rows import ROWS, VOCAB, make_row, random_logits
from tests.unit.engine.tiny_models import GREEDY, Driver, eager_logits, make_model, random_tokens


def results(driver: Driver, *rows: Row) -> list[RowResult]:
    return driver.runner.run(Batch(rows=rows))


def assert_is(entry: TokenLogprob, token_id: int, reference: torch.Tensor, num_top: int) -> None:
    """`reference`: the logits (V,) before the token."""
    expected = reference.float().log_softmax(-1)
    values, _ = expected.topk(num_top)
    assert entry.token_id == token_id
    assert entry.logprob == pytest.approx(float(expected[token_id]), abs=1e-4)
    assert len(entry.top) == num_top
    assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)
    assert [value for _, value in entry.top] == pytest.approx([float(expected[i]) for i, _ in entry.top], abs=1e-4)


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(ROWS, min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_rules_temperature_and_filters_leave_log_probabilities_alone(rows: list[Row], seed: int) -> None:
    logits = random_logits(len(rows), seed=seed)

    for row, samples, raw in zip(rows, sample(logits, rows), logits, strict=True):
        assert row.sampling is not None
        for sampled in samples:
            assert len(sampled.logprobs) == (0 if row.sampling.logprobs is None else 1)
            for entry in sampled.logprobs:
                assert_is(entry, sampled.token_ids[0], raw, row.sampling.logprobs or 0)


def test_without_top_tokens_the_chosen_one_still_has_its_log_probability() -> None:
    logits = random_logits(1)

    ((sampled,),) = sample(logits, [make_row(replace(GREEDY, logprobs=0))])

    assert sampled.logprobs[0].top == ()
    assert sampled.logprobs[0].logprob == float(logits[0].log_softmax(-1).max())


def test_the_greedy_token_is_the_first_of_the_top_ones() -> None:
    # In float32 the first two have the same log probability.
    logits = torch.tensor([[1e-8, 2e-8, -30.0]])

    ((sampled,),) = sample(logits, [make_row(replace(GREEDY, logprobs=3))])

    assert sampled.token_ids == (1,)
    assert [token_id for token_id, _ in sampled.logprobs[0].top] == [1, 0, 2]


def test_more_top_tokens_than_the_vocabulary_has_are_all_of_it() -> None:
    ((sampled,),) = sample(random_logits(1), [make_row(replace(GREEDY, logprobs=VOCAB + 5))])

    assert sorted(token_id for token_id, _ in sampled.logprobs[0].top) == list(range(VOCAB))


def test_bfloat16_logits_become_float32_first() -> None:
    logits = random_logits(1).bfloat16()

    ((sampled,),) = sample(logits, [make_row(replace(GREEDY, logprobs=4))])

    assert sampled.logprobs[0].logprob == float(logits[0].float().log_softmax(-1).max())


@pytest.mark.parametrize("tile_rows", [1, 3, 100])
def test_tiles_do_not_change_what_is_found(tile_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(7)
    wanted = [(number, number + 1) for number in range(7)]
    tops = [number % 3 for number in range(7)]
    whole = token_logprobs(logits, wanted, tops)

    monkeypatch.setattr(logprobs, "_TILE_ELEMENTS", tile_rows * VOCAB)

    assert token_logprobs(logits, wanted, tops) == whole
    assert [[len(entry.top) for entry in entries] for entries in whole] == [[count, count] for count in tops]


@pytest.mark.parametrize(
    ("num_tokens", "num_targets", "is_sampled", "kept"),
    [
        (5, 0, False, ()),
        (5, 0, True, (4,)),
        (5, 5, False, (0, 1, 2, 3, 4)),
        (5, 4, True, (0, 1, 2, 3, 4)),
        (5, 4, False, (0, 1, 2, 3)),
        (1, 0, True, (0,)),
    ],
)
def test_only_logits_that_are_needed_are_kept(
    num_tokens: int, num_targets: int, *, is_sampled: bool, kept: tuple[int, ...]
) -> None:
    row = replace(
        make_row(GREEDY),
        token_ids=(3,) * num_tokens,
        targets=(4,) * num_targets,
        sampling=GREEDY if is_sampled else None,
    )

    assert kept_places(row) == kept


def prompt_rows(
    driver: Driver, sequence: int, prompt: list[int], cuts: list[int], params: SamplingParams
) -> Iterator[Row]:
    """The prompt in chunks that end at `cuts` and at its end; a row is made when the one before has run."""
    for start, end in pairwise([0, *cuts, len(prompt)]):
        row = driver.row(sequence, prompt[start:end], start, params if end == len(prompt) else None)
        yield replace(row, targets=tuple(prompt[start + 1 : end + 1]), num_prompt_logprobs=3)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("cuts", [[], [1], [8, 9, 22]])
def test_prompt_log_probabilities_over_chunks_are_those_of_the_whole(kind: str, cuts: list[int]) -> None:
    loaded = make_model(kind)
    driver = Driver(loaded)
    prompt, other = random_tokens(23, 1), random_tokens(30, 2)

    found: list[TokenLogprob] = []
    last = RowResult()
    for number, row in enumerate(prompt_rows(driver, 0, prompt, cuts, replace(GREEDY, logprobs=2))):
        # Batch mates before and after: one samples, one does not.
        mates = (
            driver.row(1, other[number : number + 1], number),
            driver.row(2, other[2 * number :][:2], 2 * number, None),
        )
        first, last, unsampled = results(driver, mates[0], row, mates[1])
        found += last.prompt_logprobs
        assert (len(first.samples), first.prompt_logprobs, unsampled) == (1, (), RowResult())

    reference = eager_logits(loaded, prompt)
    assert len(found) == len(prompt) - 1
    for entry, token_id, logits in zip(found, prompt[1:], reference, strict=False):
        assert_is(entry, token_id, logits, 3)
    (sampled,) = last.samples
    assert_is(sampled.logprobs[0], int(reference[-1].argmax()), reference[-1], 2)


def test_a_decoded_token_has_the_log_probability_of_eager_logits() -> None:
    loaded = make_model()
    driver = Driver(loaded)
    sequence = random_tokens(9)
    params = SamplingParams(max_tokens=1, temperature=1.7, seed=3, top_k=20, repetition_penalty=1.5, logprobs=5)

    entries = []
    start = 0
    for _ in range(8):
        row = replace(driver.row(0, sequence[start:], start, params), prompt=sequence[:9], generated=sequence[9:])
        ((sampled,),) = [result.samples for result in results(driver, row)]
        start = len(sequence)
        entries.append(sampled.logprobs[0])
        sequence.append(sampled.token_ids[0])

    reference = eager_logits(loaded, sequence)[8:-1]
    for entry, token_id, logits in zip(entries, sequence[9:], reference, strict=True):
        assert_is(entry, token_id, logits, 5)
