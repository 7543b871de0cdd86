"""Sizes in bytes as people write them: a number, or text such as 512MiB and 2 GB."""

import re
from typing import Annotated

from pydantic import BeforeValidator, WithJsonSchema

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?\s*$", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(value: object) -> object:
    """Turn "512MiB", "2 GB" or "1024" into bytes; leave what is not text to the type check.

    Raises:
        ValueError: Text that is not a size.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.match(value)
    if match is None:
        raise ValueError(f'"{value}" is not a size; write for example "512MiB" or "2GB"')
    prefix = (match[2] or "").lower()
    base = 1024 if prefix.endswith("i") else 1000
    return int(float(match[1]) * base ** _POWERS[prefix[:1]])


Bytes = Annotated[
    int,
    BeforeValidator(parse_size),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": _SIZE.pattern}]}),
]
