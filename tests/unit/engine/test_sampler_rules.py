"""Biases, penalties and masks: against transformers' own processors, and what wins when nothing is left."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import MinNewTokensLengthLogitsProcessor, NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

from engine.batch import Row
from engine.logit_rules import apply_rules, has_rules
from messages.requests import SamplingParams
from tests.unit.engine.sampled_rows import IDS, ROWS, VOCAB, make_row, random_logits, tokens, tokens_of

GREEDY = SamplingParams(max_tokens=100, temperature=0.0)
SEQUENCES = st.lists(st.integers(0, 9), min_size=1, max_size=12)
NOTHING = float("-inf")


def ruled(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    changed = logits.clone()
    apply_rules(changed, rows)
    return changed


def context(row: Row) -> torch.Tensor:
    return torch.tensor([[*row.prompt, *row.generated]])


@settings(max_examples=50, deadline=None)
@given(prompt=SEQUENCES, generated=SEQUENCES, penalty=st.floats(0.1, 5.0), seed=st.integers(0, 99))
def test_the_repetition_penalty_is_that_of_transformers(
    prompt: list[int], generated: list[int], penalty: float, seed: int
) -> None:
    logits = random_logits(1, seed=seed)
    row = make_row(replace(GREEDY, repetition_penalty=penalty), prompt=prompt, generated=generated)

    expected = RepetitionPenaltyLogitsProcessor(penalty)(context(row), logits)

    torch.testing.assert_close(ruled(logits, [row]), expected)


@settings(max_examples=80, deadline=None)
@given(
    prompt=SEQUENCES,
    generated=st.lists(st.integers(0, 4), max_size=5),
    words=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=6),
)
def test_bad_words_are_those_of_transformers(prompt: list[int], generated: list[int], words: list[list[int]]) -> None:
    logits = random_logits(1)
    row = make_row(replace(GREEDY, bad_words=tuple(map(tuple, words))), prompt=prompt, generated=generated)

    expected = NoBadWordsLogitsProcessor(words)(context(row), logits)

    torch.testing.assert_close(ruled(logits, [row]), expected)


@pytest.mark.parametrize("num_generated", [0, 2, 3, 4])
def test_min_tokens_is_that_of_transformers(num_generated: int) -> None:
    logits = random_logits(1)
    params = replace(GREEDY, min_tokens=3, end_token_ids=(2, 5), stop_token_ids=(9,))
    row = make_row(params, prompt=[4, 4], generated=[1] * num_generated)

    expected = MinNewTokensLengthLogitsProcessor(2, 3, [2, 5, 9])(context(row), logits)

    torch.testing.assert_close(ruled(logits, [row]), expected)
    assert has_rules(row) == (num_generated < 3)


@settings(max_examples=50, deadline=None)
@given(
    prompt=SEQUENCES, generated=st.lists(st.integers(0, 9), max_size=12), f=st.floats(-2.0, 2.0), p=st.floats(-2.0, 2.0)
)
def test_frequency_and_presence_count_generated_tokens_only(
    prompt: list[int], generated: list[int], f: float, p: float
) -> None:
    logits = random_logits(1)
    row = make_row(replace(GREEDY, frequency_penalty=f, presence_penalty=p), prompt=prompt, generated=generated)

    counts = torch.tensor([[generated.count(token_id) for token_id in range(VOCAB)]])

    torch.testing.assert_close(ruled(logits, [row]), logits - f * counts - p * (counts > 0))


def test_a_token_of_the_prompt_is_not_penalised_by_frequency_or_presence() -> None:
    logits = random_logits(1)
    best, second = logits[0].topk(2).indices.tolist()
    params = replace(GREEDY, presence_penalty=2.0, frequency_penalty=2.0)

    assert tokens(logits, [make_row(params, prompt=[best] * 9)]) == [best]
    assert tokens(logits, [make_row(params, prompt=[best], generated=[best] * 9)]) == [second]


def test_a_bias_comes_before_the_penalties_and_adds_up() -> None:
    logits = torch.tensor([[1.0, -1.0, 0.0, 3.0]])
    params = replace(
        GREEDY,
        logit_bias=((0, 2.0), (1, 3.0), (1, 1.0), (3, -100.0)),
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
    )
    row = make_row(params, prompt=[3], generated=[1, 1])

    changed = ruled(logits, [row])

    assert changed.tolist() == [[3.0, (-1.0 + 4.0) / 2 - 0.5 - 2 * 0.25, 0.0, (3.0 - 100.0) * 2]]


@settings(max_examples=80, deadline=None)
@given(rows=st.lists(ROWS, min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_rules_change_a_row_alike_alone_and_in_a_batch(rows: list[Row], seed: int) -> None:
    logits = random_logits(len(rows), seed=seed)

    batched = ruled(logits, rows)

    for number, row in enumerate(rows):
        alone = ruled(logits[number : number + 1], [row])[0]
        assert torch.equal(batched[number], alone)
        assert has_rules(row) or torch.equal(alone, logits[number])


def grammar_of(row: Row) -> set[int] | None:
    if row.matcher is None:
        return None
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    row.matcher.fill_mask(mask)
    return set(mask.nonzero().flatten().tolist())


def permitted(row: Row) -> set[int]:
    """What may come by a plain reading of the rules; one that would leave nothing is passed over."""
    params = row.sampling
    assert params is not None
    known = [*row.prompt, *row.generated]
    ends = set(params.end_token_ids + params.stop_token_ids)
    allowed = set(range(VOCAB))
    bad = {
        word[-1] for word in params.bad_words if word and (len(word) == 1 or known[-len(word) + 1 :] == [*word[:-1]])
    }
    for rule in (
        grammar_of(row),
        None if params.allowed_token_ids is None else set(params.allowed_token_ids),
        set(range(VOCAB)) - bad,
        set(range(VOCAB)) - (ends if len(row.generated) < params.min_tokens else set()),
    ):
        if rule is not None and allowed & rule:
            allowed &= rule
    return allowed


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(ROWS, min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_what_may_not_come_never_comes(rows: list[Row], seed: int) -> None:
    rows = [replace(row, choices=tuple(range(10))) for row in rows]

    drawn = tokens_of(random_logits(len(rows), seed=seed), rows)

    for row, found in zip(rows, drawn, strict=True):
        assert set(found) <= permitted(row)


@settings(max_examples=50, deadline=None)
@given(row=ROWS, allowed=st.lists(IDS, min_size=1, max_size=20), seed=st.integers(0, 99))
def test_a_greedy_row_takes_the_best_of_what_may_come(row: Row, allowed: list[int], seed: int) -> None:
    assert row.sampling is not None
    plain = replace(GREEDY, allowed_token_ids=tuple(allowed), bad_words=row.sampling.bad_words)
    logits = random_logits(1, seed=seed)
    row = replace(row, sampling=plain, choices=(0,))

    (found,) = tokens(logits, [row])

    assert float(logits[0, found]) == max(float(logits[0, token_id]) for token_id in permitted(row))


def test_the_grammar_has_the_last_word() -> None:
    logits = torch.arange(VOCAB).float()[None]
    against_all = replace(
        GREEDY, allowed_token_ids=(1, 2), bad_words=((7,), (8,)), min_tokens=5, end_token_ids=(7, 8), logprobs=0
    )

    assert tokens(logits, [make_row(against_all, grammar=[7, 8])]) == [8]
    assert tokens(logits, [make_row(replace(against_all, bad_words=((8,),)), grammar=[7, 8])]) == [7]
    assert tokens(logits, [make_row(replace(against_all, temperature=1.0, top_p=0.5), grammar=[8])]) == [8]


def test_the_weakest_rule_gives_way_first() -> None:
    logits = torch.arange(VOCAB).float()[None]
    params = replace(GREEDY, allowed_token_ids=(5, 6), min_tokens=1, end_token_ids=(5,), bad_words=((6,),))

    assert tokens(logits, [make_row(params)]) == [5]
    assert tokens(logits, [make_row(replace(params, bad_words=((5,), (6,))))]) == [6]
    assert tokens(logits, [make_row(replace(params, allowed_token_ids=()))]) == [VOCAB - 1]


def test_an_allowed_token_to_which_the_model_gives_nothing_still_comes_before_others() -> None:
    logits = random_logits(1)
    logits[0, [3, 4]] = NOTHING
    rows = [make_row(replace(GREEDY, allowed_token_ids=(3, 4))), make_row(replace(GREEDY, temperature=1.0, seed=1))]

    assert tokens(logits, rows[:1]) == [3]
    assert tokens(logits, [replace(rows[1], matcher=make_row(GREEDY, grammar=[4]).matcher)]) == [4]


@pytest.mark.parametrize("token_id", [-1, VOCAB, 2**40])
def test_ids_outside_the_vocabulary_change_nothing(token_id: int) -> None:
    logits = random_logits(1)
    params = replace(
        GREEDY,
        logit_bias=((token_id, 50.0),),
        bad_words=((token_id,),),
        min_tokens=5,
        end_token_ids=(token_id,),
        repetition_penalty=2.0,
        presence_penalty=2.0,
    )
    row = make_row(params, prompt=[token_id], generated=[token_id])

    assert torch.equal(ruled(logits, [row]), logits)
    only_known = replace(GREEDY, allowed_token_ids=(token_id, 4))
    assert tokens(logits, [make_row(only_known)]) == [4]


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(ROWS, min_size=1, max_size=5))
def test_the_logits_given_are_left_as_they_are(rows: list[Row]) -> None:
    assume(any(has_rules(row) for row in rows))
    logits = random_logits(len(rows))
    before = logits.clone()

    tokens(logits, rows)

    assert torch.equal(logits, before)
