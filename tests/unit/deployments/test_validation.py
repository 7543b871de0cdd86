"""Every refusal names the field and the limit."""

from typing import Any

import pytest

from deployments.gateway.validation import make_spec, refuse_unknown
from messages.errors import InvalidRequest


def spec(**sampling: object) -> Any:
    return make_spec(prompt="hi", model=None, sampling=sampling)


def test_absent_and_null_fields_take_their_defaults() -> None:
    assert spec() == spec(max_tokens=None, temperature=None, top_p=None, top_k=None, seed=None, stop=None)
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


def test_unknown_fields_are_named() -> None:
    with pytest.raises(InvalidRequest, match=r"unsupported parameter: n, logprobs") as raised:
        refuse_unknown(["model", "n", "logprobs"], ["model"])
    assert raised.value.context["param"] == "n"

    with pytest.raises(InvalidRequest, match=r"messages\.0\.name"):
        refuse_unknown(["name"], ["role"], inside="messages.0")
