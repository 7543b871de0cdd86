"""What the workers sample by: limits of vocabulary and context, words as tokens, ends."""

from pathlib import Path
from typing import Any

import pytest

from deployments.gateway.sampling import make_sampling
from deployments.service import GenerationSpec
from engine.tokenizer import Tokenizer
from messages.errors import InvalidRequest
from messages.requests import Grammar, GrammarKind, SamplingParams
from tests.contract.scripted_router import ADDED, END, ONCE, TIME, make_tokenizer
from tests.unit.engine.test_tokenizer import make_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("words"))


def sampling(tokenizer: Tokenizer, *, prompt_tokens: int = 5, context_length: int = 2048, **fields: Any) -> Any:
    spec = GenerationSpec(prompt="once", **fields)
    return make_sampling(spec, tokenizer, prompt_tokens=prompt_tokens, context_length=context_length)


def refusal(tokenizer: Tokenizer, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        sampling(tokenizer, **fields)
    return raised.value


def test_every_parameter_reaches_the_workers(tokenizer: Tokenizer) -> None:
    grammar = Grammar(kind=GrammarKind.REGEX, source="a")
    same: dict[str, Any] = {
        "max_tokens": 9,
        "min_tokens": 3,
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "seed": 11,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.5,
        "logit_bias": ((1, -2.0),),
        "allowed_token_ids": (1, 2),
        "stop": ("x",),
        "stop_token_ids": (3,),
        "logprobs": 4,
        "prompt_logprobs": 0,
        "grammar": grammar,
    }

    params = sampling(tokenizer, bad_words=("once",), **same)

    assert params == SamplingParams(bad_words=((ONCE,),), end_token_ids=(END,), **same)


def test_the_models_own_end_tokens_are_left_out_when_they_are_to_be_ignored(tokenizer: Tokenizer) -> None:
    assert sampling(tokenizer).end_token_ids == (END,)
    assert sampling(tokenizer, ignore_eos=True).end_token_ids == ()


def test_a_request_without_a_seed_gets_one_of_its_own(tokenizer: Tokenizer) -> None:
    assert sampling(tokenizer, seed=0).seed == 0
    assert sampling(tokenizer).seed != sampling(tokenizer).seed


@pytest.mark.parametrize("make", [lambda i: {"logit_bias": ((i, 1.0),)}, lambda i: {"allowed_token_ids": (0, i)}])
def test_the_last_added_token_is_in_the_vocabulary_and_the_next_id_is_not(tokenizer: Tokenizer, make: Any) -> None:
    (field,) = make(0)

    sampling(tokenizer, **make(ADDED))
    error = refusal(tokenizer, **make(ADDED + 1))

    assert error.context["param"] == field
    assert error.message == f"{field}: token id {ADDED + 1} is not in the vocabulary, whose ids are 0..{ADDED}"


def test_a_stop_token_is_one_of_the_vocabulary(tokenizer: Tokenizer) -> None:
    assert sampling(tokenizer, stop_token_ids=(ADDED,)).stop_token_ids == (ADDED,)
    assert refusal(tokenizer, stop_token_ids=(ADDED + 1,)).context["param"] == "stop_token_ids"


def test_max_tokens_fills_the_context_and_no_more(tokenizer: Tokenizer) -> None:
    room = {"prompt_tokens": 2045, "context_length": 2048}

    assert sampling(tokenizer, max_tokens=3, **room).max_tokens == 3
    assert sampling(tokenizer, **room).max_tokens == 3
    error = refusal(tokenizer, max_tokens=4, **room)
    assert error.context["param"] == "max_tokens"
    assert all(number in error.message for number in ("2048", "2045", "4"))
    assert refusal(tokenizer, prompt_tokens=2048, context_length=2048).context["param"] == "prompt"


def test_min_tokens_is_at_most_what_the_context_holds(tokenizer: Tokenizer) -> None:
    room = {"prompt_tokens": 2045, "context_length": 2048}

    assert sampling(tokenizer, min_tokens=3, **room).min_tokens == 3
    assert refusal(tokenizer, min_tokens=4, **room).context["param"] == "min_tokens"


def test_a_bad_word_is_banned_with_and_without_a_space_before_it(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make_folder(tmp_path))

    banned = sampling(tokenizer, bad_words=("ab", " ab", " ")).bad_words

    bare, spaced, space = (tuple(tokenizer.encode(text)[1:]) for text in ("ab", " ab", " "))
    assert banned == (bare, spaced, space)


def test_a_bad_word_without_tokens_is_refused(tokenizer: Tokenizer) -> None:
    assert refusal(tokenizer, bad_words=(" ",)).context["param"] == "bad_words"


def test_a_multi_word_phrase_is_one_sequence(tokenizer: Tokenizer) -> None:
    assert sampling(tokenizer, bad_words=("once time",)).bad_words == ((ONCE, TIME),)
