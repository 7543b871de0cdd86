"""Turns what pydantic says about a wrong field into one line that names the field and the nearest right name."""

import difflib
from typing import Any

from pydantic import BaseModel, ValidationError


def first_line(error: ValidationError, root: type[BaseModel]) -> str:
    """Tell the first error of `root`'s fields, and how many more there are."""
    details = error.errors(include_url=False)
    first = details[0]
    field = ".".join(str(part) for part in first["loc"])
    text = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        text = f"no such field{_near_miss(first['loc'], root)}"
    elif first["type"] == "missing":
        text = "is missing"
    elif isinstance(first["input"], str | int | float | bool):
        text = f"{text}, got {first['input']!r}"
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    return f"{field}: {text}{more}" if field else f"{text}{more}"


def _near_miss(location: tuple[int | str, ...], root: type[BaseModel]) -> str:
    section: Any = root
    for part in location[:-1]:
        if isinstance(part, str):
            section = section.model_fields[part].annotation
            section = next(iter(getattr(section, "__args__", ())), section)
    close = difflib.get_close_matches(str(location[-1]), section.model_fields, n=1)
    return f'; did you mean "{close[0]}"?' if close else f"; there are {', '.join(section.model_fields)}"
