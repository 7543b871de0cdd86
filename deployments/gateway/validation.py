"""Limits of a request's fields, the same at both doors; every refusal names the field and the limit."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from deployments.service import GenerationSpec, Prompt
from messages.errors import InvalidRequest
from messages.requests import Grammar

MAX_INT32 = 2**31 - 1
MAX_SEED = 2**64 - 1
MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 10.0
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARACTERS = 256
ROLES = ("system", "user", "assistant", "tool")
SAMPLING_FIELDS = (
    "max_tokens",
    "min_tokens",
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "priority",
)


def make_spec(
    *,
    prompt: Prompt,
    model: str | None,
    sampling: Mapping[str, object],
    grammar: Grammar | None = None,
    echo: bool = False,
    timeout_s: float | None = None,
) -> GenerationSpec:
    """Check the sampling fields by name; a field that is absent or None takes its default.

    Raises:
        InvalidRequest: A field has the wrong type or is out of its limits.
    """
    given = {name: value for name, value in sampling.items() if value is not None}
    spec = GenerationSpec(
        prompt=prompt,
        model=model,
        max_tokens=_optional_integer(given, "max_tokens", low=1, high=MAX_INT32),
        min_tokens=integer(given.get("min_tokens", 0), "min_tokens", low=0, high=MAX_INT32),
        n=integer(given.get("n", 1), "n", low=1, high=MAX_CHOICES),
        temperature=number(given.get("temperature", 1.0), "temperature", low=0.0, high=2.0),
        top_p=number(given.get("top_p", 1.0), "top_p", low=0.0, high=1.0, without_low=True),
        top_k=integer(given.get("top_k", 0), "top_k", low=0, high=MAX_INT32),
        min_p=number(given.get("min_p", 0.0), "min_p", low=0.0, high=1.0),
        seed=_optional_integer(given, "seed", low=0, high=MAX_SEED),
        presence_penalty=_penalty(given, "presence_penalty"),
        frequency_penalty=_penalty(given, "frequency_penalty"),
        repetition_penalty=number(
            given.get("repetition_penalty", 1.0),
            "repetition_penalty",
            low=0.0,
            high=MAX_REPETITION_PENALTY,
            without_low=True,
        ),
        logit_bias=logit_bias(given["logit_bias"]) if "logit_bias" in given else (),
        allowed_token_ids=token_ids(given["allowed_token_ids"], "allowed_token_ids")
        if "allowed_token_ids" in given
        else None,
        bad_words=_words(given["bad_words"]) if "bad_words" in given else (),
        grammar=grammar,
        stop=stop_strings(given["stop"]) if "stop" in given else (),
        stop_token_ids=token_ids(given["stop_token_ids"], "stop_token_ids", low=0, high=MAX_STOP_TOKEN_IDS)
        if "stop_token_ids" in given
        else (),
        include_stop=_flag(given, "include_stop_str_in_output"),
        ignore_eos=_flag(given, "ignore_eos"),
        logprobs=_optional_integer(given, "logprobs", low=0, high=MAX_LOGPROBS),
        prompt_logprobs=_optional_integer(given, "prompt_logprobs", low=0, high=MAX_LOGPROBS),
        echo=echo,
        priority=integer(given.get("priority", 0), "priority", low=-MAX_INT32, high=MAX_INT32),
        timeout_s=timeout_s,
    )
    _check_together(spec)
    return spec


def _check_together(spec: GenerationSpec) -> None:
    if spec.max_tokens is not None and spec.min_tokens > spec.max_tokens:
        message = f"min_tokens must be at most max_tokens, which is {spec.max_tokens}"
        raise InvalidRequest(message, param="min_tokens")
    if spec.ignore_eos and spec.grammar is not None:
        raise InvalidRequest(
            "ignore_eos does not go with structured output, which an end token ends", param="ignore_eos"
        )


def refuse_unknown(given: Iterable[str], known: Collection[str], *, inside: str = "") -> None:
    """Raise InvalidRequest that names the fields of `given` that are not in `known`; `inside` is their parent."""
    unknown = [f"{inside}.{name}" if inside else name for name in given if name not in known]
    if unknown:
        names = ", ".join(name[:64] for name in unknown[:10])
        raise InvalidRequest(f"unsupported parameter: {names}", param=unknown[0][:64], reason="unsupported_parameter")


def integer(value: object, name: str, *, low: int, high: int) -> int:
    """Return `value` if it is an integer of low..high; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, not {_kind(value)}", param=name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be in {low}..{high}", param=name)
    return value


def number(value: object, name: str, *, low: float, high: float, without_low: bool = False) -> float:
    """Return `value` as a float of [low, high], or (low, high] with `without_low`; NaN is in no interval."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a number, not {_kind(value)}", param=name)
    if math.isnan(value) or not low <= value <= high or (without_low and value == low):
        bracket = "(" if without_low else "["
        raise InvalidRequest(f"{name} must be in {bracket}{low:g}, {high:g}]", param=name)
    return float(value)


def stop_strings(value: object, name: str = "stop") -> tuple[str, ...]:
    """Return one stop string or a list of 1..16 of them, each of 1..256 characters, without repetitions."""
    stops: Sequence[object] = [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else ()
    if not 1 <= len(stops) <= MAX_STOPS:
        raise InvalidRequest(f"{name} must be a string or a list of 1..{MAX_STOPS} strings", param=name)
    return _distinct_texts(stops, name, MAX_STOP_CHARACTERS)


def token_ids(value: object, name: str, *, low: int = 1, high: int = MAX_INT32) -> tuple[int, ...]:
    """Return a list of low..high token ids without repetitions; whether the vocabulary has them is not known here."""
    if not isinstance(value, list | tuple):
        raise InvalidRequest(f"{name} must be a list of token ids, not {_kind(value)}", param=name)
    if not low <= len(value) <= high:
        limit = f"at least {low}" if high == MAX_INT32 else f"{low}..{high}"
        raise InvalidRequest(f"{name} must have {limit} token ids", param=name)
    return tuple(dict.fromkeys(integer(token_id, name, low=0, high=MAX_INT32) for token_id in value))


def logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    """Return (token id, bias) of a map from token ids, which JSON spells as strings, to -100..100."""
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"logit_bias must be a map of token ids, not {_kind(value)}", param="logit_bias")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        token_id = _token_id_of_key(key)
        if token_id in biases:
            raise InvalidRequest(f"logit_bias has token id {token_id} twice", param="logit_bias")
        biases[token_id] = number(bias, "logit_bias", low=-MAX_BIAS, high=MAX_BIAS)
    return tuple(biases.items())


def _token_id_of_key(key: object) -> int:
    # At most 10 digits, because a longer one is no id and int() of a very long one is refused with another error.
    if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= len(str(MAX_INT32)):
        key = int(key)
    if not isinstance(key, int):
        raise InvalidRequest(f"logit_bias: {str(key)[:64]!r} is not a token id", param="logit_bias")
    return integer(key, "logit_bias", low=0, high=MAX_INT32)


def texts(value: object, name: str, *, low: int, high: int, max_characters: int) -> tuple[str, ...]:
    """Return a list of low..high strings, each of 1..max_characters characters, without repetitions."""
    if not isinstance(value, list | tuple):
        raise InvalidRequest(f"{name} must be a list of strings, not {_kind(value)}", param=name)
    if not low <= len(value) <= high:
        raise InvalidRequest(f"{name} must have {low}..{high} strings", param=name)
    return _distinct_texts(value, name, max_characters)


def text(value: object, name: str) -> str:
    """Return `value` if it is a string that UTF-8 can carry."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string, not {_kind(value)}", param=name)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} is not valid Unicode (a lone surrogate)", param=name) from error
    return value


def role(value: object, name: str) -> str:
    """Return `value` if it is a role that a message may have."""
    if value not in ROLES:
        raise InvalidRequest(f"{name} must be one of {', '.join(ROLES)}", param=name)
    return str(value)


def boolean(value: object, name: str) -> bool:
    """Return `value` if it is true or false."""
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false, not {_kind(value)}", param=name)
    return value


def _words(value: object) -> tuple[str, ...]:
    return texts(value, "bad_words", low=0, high=MAX_BAD_WORDS, max_characters=MAX_BAD_WORD_CHARACTERS)


def _distinct_texts(values: Sequence[object], name: str, max_characters: int) -> tuple[str, ...]:
    checked = [text(value, name) for value in values]
    if not all(1 <= len(value) <= max_characters for value in checked):
        raise InvalidRequest(f"each string of {name} must have 1..{max_characters} characters", param=name)
    return tuple(dict.fromkeys(checked))


def _penalty(given: Mapping[str, object], name: str) -> float:
    return number(given.get(name, 0.0), name, low=-MAX_PENALTY, high=MAX_PENALTY)


def _flag(given: Mapping[str, object], name: str) -> bool:
    return boolean(given.get(name, False), name)


def _optional_integer(given: Mapping[str, object], name: str, *, low: int, high: int) -> int | None:
    return integer(given[name], name, low=low, high=high) if name in given else None


def _kind(value: object) -> str:
    """The JSON name of a value's type."""
    kinds = {type(None): "null", bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return kinds.get(type(value), "a number")
