"""Ctrl-C, SIGTERM and a closed terminal: the first asks for an orderly end, the second ends at once."""

import os
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 130
"""Exit code of a command that was stopped before it had done its work."""


class StopSignals:
    """Inside `with`, the first signal raises KeyboardInterrupt in the main thread, the next calls `on_force` and exits.

    Args:
        on_force: Ends everything without waiting for it.
    """

    def __init__(self, on_force: Callable[[], None]) -> None:
        self._on_force = on_force
        self._num_received = 0
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal gave us

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._num_received += 1
        if self._num_received > 1:
            self._on_force()
            os._exit(INTERRUPTED)
        raise KeyboardInterrupt
