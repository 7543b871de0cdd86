"""What transformers prints while it loads: nothing, and its progress goes to a callback."""

import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

from transformers.utils import logging

Progress = Callable[[str, float], None]
"""Called with a stage in words and the fraction of that stage, 0 to 1."""


class _ReportedBar:
    """What the library takes for a progress bar over `items`."""

    def __init__(self, items: Iterable[Any], stage: str, report: Progress) -> None:
        self._items = items
        self._stage = stage
        self._report = report

    def __iter__(self) -> Iterator[Any]:
        items = list(self._items)
        for done, item in enumerate(items):
            self._report(self._stage, done / len(items))
            yield item


@contextmanager
def reported_loading(stage: str, report: Progress) -> Iterator[None]:
    """Inside it, what the library iterates over with a bar is reported as the progress of `stage`; not reentrant."""

    def make_bar(factory: Callable[..., Any], positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if positional:
            return _ReportedBar(positional[0], stage, report)
        return factory(**{**named, "disable": True})

    report(stage, 0.0)
    previous = logging.set_tqdm_hook(make_bar)
    try:
        with quiet_library():
            yield
    finally:
        logging.set_tqdm_hook(previous)
    report(stage, 1.0)


@contextmanager
def quiet_library() -> Iterator[None]:
    """No bars or warnings of the library while it works; the caller has its own."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # The GGUF reader draws its own bar, which no setting turns off.
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
