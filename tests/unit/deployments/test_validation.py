"""Every refusal names the field and the limit."""

from typing import Any

import pytest

from deployments.gateway.validation import SAMPLING_FIELDS, make_spec, refuse_unknown
from deployments.service import GenerationSpec
from messages.errors import InvalidRequest


def spec(**sampling: object) -> Any:
    return make_spec(prompt="hi", model=None, sampling=sampling)


def test_absent_and_null_fields_take_their_defaults() -> None:
    assert spec() == spec(**dict.fromkeys(SAMPLING_FIELDS)) == GenerationSpec(prompt="hi")
    assert (spec().temperature, spec().top_p, spec().top_k, spec().stop) == (1.0, 1.0, 0, ())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 1),
        ("max_tokens", 2**31 - 1),
        ("temperature", 0),
        ("temperature", 2.0),
        ("top_p", 1),
        ("top_p", 1e-9),
        ("top_k", 0),
        ("seed", 0),
        ("seed", 2**64 - 1),
        ("min_tokens", 0),
        ("min_tokens", 2**31 - 1),
        ("n", 1),
        ("n", 16),
        ("min_p", 0),
        ("min_p", 1),
        ("presence_penalty", -2),
        ("presence_penalty", 2.0),
        ("frequency_penalty", -2),
        ("frequency_penalty", 2.0),
        ("repetition_penalty", 1e-6),
        ("repetition_penalty", 10),
        ("logprobs", 0),
        ("logprobs", 20),
        ("prompt_logprobs", 0),
        ("prompt_logprobs", 20),
        ("priority", -(2**31) + 1),
        ("priority", 2**31 - 1),
        ("ignore_eos", True),
    ],
)
def test_the_limits_themselves_are_allowed(field: str, value: float) -> None:
    assert getattr(spec(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("max_tokens", 0, "1..2147483647"),
        ("max_tokens", -1, "1..2147483647"),
        ("max_tokens", 2**31, "1..2147483647"),
        ("max_tokens", True, "integer, not a boolean"),
        ("max_tokens", 1.0, "integer, not a number"),
        ("max_tokens", "5", "integer, not a string"),
        ("temperature", -0.1, "[0, 2]"),
        ("temperature", 2.1, "[0, 2]"),
        ("temperature", float("nan"), "[0, 2]"),
        ("temperature", float("inf"), "[0, 2]"),
        ("temperature", False, "number, not a boolean"),
        ("temperature", [1], "number, not a list"),
        ("top_p", 0, "(0, 1]"),
        ("top_p", 1.01, "(0, 1]"),
        ("top_p", float("nan"), "(0, 1]"),
        ("top_k", -1, "0..2147483647"),
        ("top_k", 2.5, "integer"),
        ("seed", -1, "0..18446744073709551615"),
        ("seed", 2**64, "0..18446744073709551615"),
        ("stop", "", "1..256 characters"),
        ("stop", "x" * 257, "1..256 characters"),
        ("stop", [], "1..16"),
        ("stop", ["x"] * 17, "1..16"),
        ("stop", ["ok", ""], "1..256 characters"),
        ("stop", [1], "a string, not a number"),
        ("stop", {"a": 1}, "1..16"),
        ("stop", ["\ud800"], "Unicode"),
        ("min_tokens", -1, "0..2147483647"),
        ("n", 0, "1..16"),
        ("n", 17, "1..16"),
        ("n", 1.5, "integer"),
        ("min_p", -0.01, "[0, 1]"),
        ("min_p", 1.01, "[0, 1]"),
        ("min_p", float("nan"), "[0, 1]"),
        ("presence_penalty", -2.01, "[-2, 2]"),
        ("presence_penalty", 2.01, "[-2, 2]"),
        ("frequency_penalty", -2.01, "[-2, 2]"),
        ("frequency_penalty", 2.01, "[-2, 2]"),
        ("repetition_penalty", 0, "(0, 10]"),
        ("repetition_penalty", 10.5, "(0, 10]"),
        ("logprobs", -1, "0..20"),
        ("logprobs", 21, "0..20"),
        ("logprobs", True, "integer, not a boolean"),
        ("prompt_logprobs", 21, "0..20"),
        ("logit_bias", {"abc": 1}, "'abc' is not a token id"),
        ("logit_bias", {"-1": 1}, "'-1' is not a token id"),
        ("logit_bias", {"1.5": 1}, "'1.5' is not a token id"),
        ("logit_bias", {" 1": 1}, "is not a token id"),
        ("logit_bias", {"\u0661": 1}, "is not a token id"),
        ("logit_bias", {"9" * 5000: 1}, "is not a token id"),
        ("logit_bias", {"9999999999": 1}, "0..2147483647"),
        ("logit_bias", {"1": 1, "01": 2}, "twice"),
        ("logit_bias", {"1": 100.5}, "[-100, 100]"),
        ("logit_bias", {"1": -100.5}, "[-100, 100]"),
        ("logit_bias", {"1": "2"}, "number, not a string"),
        ("logit_bias", [[1, 2]], "a map of token ids, not a list"),
        ("allowed_token_ids", [], "at least 1"),
        ("allowed_token_ids", 5, "a list of token ids, not a number"),
        ("allowed_token_ids", [-1], "0..2147483647"),
        ("allowed_token_ids", ["1"], "integer, not a string"),
        ("stop_token_ids", list(range(65)), "0..64"),
        ("stop_token_ids", [True], "integer, not a boolean"),
        ("bad_words", ["x"] * 65, "0..64"),
        ("bad_words", [""], "1..256 characters"),
        ("bad_words", ["x" * 257], "1..256 characters"),
        ("bad_words", "word", "a list of strings, not a string"),
        ("priority", 2**31, "2147483647"),
        ("ignore_eos", 1, "true or false"),
        ("include_stop_str_in_output", "yes", "true or false"),
    ],
)
def test_a_value_out_of_its_limits_is_refused_with_field_and_limit(field: str, value: object, limit: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        spec(**{field: value})

    assert field in raised.value.message
    assert limit in raised.value.message
    assert raised.value.context["param"] == field


def test_one_stop_string_is_a_list_of_one_and_repetitions_go() -> None:
    assert spec(stop="END").stop == ("END",)
    assert spec(stop=["a", "b", "a"]).stop == ("a", "b")


def test_lists_at_their_limits_are_taken_without_repetitions() -> None:
    assert spec(stop_token_ids=list(range(64))).stop_token_ids == tuple(range(64))
    assert spec(stop_token_ids=[3, 3]).stop_token_ids == (3,)
    assert spec(stop_token_ids=[], bad_words=[]) == spec()
    assert spec(allowed_token_ids=[0]).allowed_token_ids == (0,)
    assert len(spec(bad_words=[str(number) for number in range(64)]).bad_words) == 64
    assert spec(logit_bias={"7": -100, "8": 100}).logit_bias == ((7, -100.0), (8, 100.0))
    assert spec(logit_bias={7: 0}).logit_bias == ((7, 0.0),)


def test_min_tokens_is_at_most_max_tokens() -> None:
    assert spec(min_tokens=5, max_tokens=5).min_tokens == 5

    with pytest.raises(InvalidRequest, match="at most max_tokens, which is 5") as raised:
        spec(min_tokens=6, max_tokens=5)
    assert raised.value.context["param"] == "min_tokens"


def test_several_choices_may_be_greedy() -> None:
    assert spec(n=2, temperature=0).n == 2


def test_unknown_fields_are_named() -> None:
    with pytest.raises(InvalidRequest, match=r"unsupported parameter: n, logprobs") as raised:
        refuse_unknown(["model", "n", "logprobs"], ["model"])
    assert raised.value.context["param"] == "n"

    with pytest.raises(InvalidRequest, match=r"messages\.0\.name"):
        refuse_unknown(["name"], ["role"], inside="messages.0")
