"""The error tree is drawn as it is, and every error survives the way between processes."""

import pickle
import re

import pytest

from messages import errors
from messages.errors import ServingError

DRAWN = re.compile(r"^ {4}((?:[|`][- ] |   )*)(\w+) +([A-Z_]+)( +retryable)?$", re.MULTILINE)
DEPTH = len("|- ")


def kinds(root: type[ServingError] = ServingError) -> list[type[ServingError]]:
    """The root and every class below it in messages/errors.py, as a reader of the drawing meets them."""
    return [root] + [
        kind for child in root.__subclasses__() if child.__module__ == errors.__name__ for kind in kinds(child)
    ]


def drawing() -> dict[str, tuple[str | None, str, bool]]:
    """Class name -> parent, code and retryable, in the order of the drawing."""
    rows: dict[str, tuple[str | None, str, bool]] = {}
    path: list[str] = []
    for branch, name, code, retryable in DRAWN.findall(errors.__doc__ or ""):
        path = [*path[: len(branch) // DEPTH], name]
        rows[name] = (path[-2] if len(path) > 1 else None, code, bool(retryable))
    return rows


def test_the_drawing_equals_the_classes() -> None:
    classes = {
        kind.__name__: (None if kind is ServingError else kind.__bases__[0].__name__, kind.code, kind.retryable)
        for kind in kinds()
    }

    assert drawing() == classes
    assert list(drawing()) == list(classes)


@pytest.mark.parametrize("kind", kinds())
def test_every_error_survives_pickling_with_its_context(kind: type[ServingError]) -> None:
    copy = pickle.loads(pickle.dumps(kind("no free blocks", wanted=3, message_of="x", self_id=None)))

    assert type(copy) is kind
    assert copy.message == "no free blocks"
    assert copy.context == {"wanted": 3, "message_of": "x", "self_id": None}
    assert str(copy) == "no free blocks (wanted=3, message_of=x, self_id=None)"


@pytest.mark.parametrize("kind", kinds())
def test_an_error_without_context_is_its_message(kind: type[ServingError]) -> None:
    assert str(kind("why")) == "why"
