"""Limits of a request's fields, the same at both doors; every refusal names the field and the limit."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from deployments.service import GenerationSpec, Prompt
from messages.errors import InvalidRequest

MAX_INT32 = 2**31 - 1
MAX_SEED = 2**64 - 1
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
ROLES = ("system", "user", "assistant")
SAMPLING_FIELDS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")


def make_spec(
    *,
    prompt: Prompt,
    model: str | None,
    sampling: Mapping[str, object],
    timeout_s: float | None = None,
) -> GenerationSpec:
    """Check the sampling fields by name; a field that is absent or None takes its default.

    Raises:
        InvalidRequest: A field has the wrong type or is out of its limits.
    """
    given = {name: value for name, value in sampling.items() if value is not None}
    return GenerationSpec(
        prompt=prompt,
        model=model,
        max_tokens=_optional_integer(given, "max_tokens", low=1, high=MAX_INT32),
        temperature=number(given.get("temperature", 1.0), "temperature", low=0.0, high=2.0),
        top_p=number(given.get("top_p", 1.0), "top_p", low=0.0, high=1.0, without_low=True),
        top_k=integer(given.get("top_k", 0), "top_k", low=0, high=MAX_INT32),
        seed=_optional_integer(given, "seed", low=0, high=MAX_SEED),
        stop=stop_strings(given["stop"]) if "stop" in given else (),
        timeout_s=timeout_s,
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
    checked = [text(stop, name) for stop in stops]
    if not all(1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in checked):
        raise InvalidRequest(f"each string of {name} must have 1..{MAX_STOP_CHARACTERS} characters", param=name)
    return tuple(dict.fromkeys(checked))


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


def _optional_integer(given: Mapping[str, object], name: str, *, low: int, high: int) -> int | None:
    return integer(given[name], name, low=low, high=high) if name in given else None


def _kind(value: object) -> str:
    """The JSON name of a value's type."""
    kinds = {type(None): "null", bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return kinds.get(type(value), "a number")
