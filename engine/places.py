"""Where every choice of every request is on this worker: waiting, receiving, running or held, in one place each."""

import bisect
from collections.abc import Iterator

from engine.request import Part, RequestState
from messages.requests import RequestId

Key = tuple[RequestId, int]


class Places:
    """Only choices that wait have no blocks."""

    def __init__(self) -> None:
        self.waiting: list[RequestState] = []
        """In order of admission."""
        self.receiving: dict[RequestId, RequestState] = {}
        """Whose blocks are being read: DECODE parts, and others that borrow; one per request, whatever its choices."""
        self.running: dict[Key, RequestState] = {}
        self.held: dict[RequestId, RequestState] = {}
        """Finished PREFILL parts whose blocks a hand-off still needs."""

    def __iter__(self) -> Iterator[RequestState]:
        yield from self.waiting
        yield from self.receiving.values()
        yield from self.running.values()
        yield from self.held.values()

    def wait(self, state: RequestState) -> None:
        """Queue a choice by priority and arrival."""
        bisect.insort(self.waiting, state, key=lambda waiting: waiting.order)

    def unstarted(self, request_id: RequestId) -> RequestState | None:
        """The DECODE part of a request, being pulled or still waiting for blocks."""
        waiting = (state for state in self.waiting if state.request_id == request_id)
        return self.receiving.get(request_id) or next(waiting, None)

    def youngest(self) -> RequestState | None:
        """The running choice to preempt first: the least urgent, then the latest; never a PREFILL part."""
        candidates = (state for state in self.running.values() if state.part is not Part.PREFILL)
        return max(candidates, key=lambda state: state.order, default=None)

    def remove(self, request_id: RequestId) -> list[RequestState]:
        """Take every choice of a request out of its place."""
        states = [state for state in self if state.request_id == request_id]
        self.waiting = [state for state in self.waiting if state.request_id != request_id]
        self.receiving.pop(request_id, None)
        self.held.pop(request_id, None)
        for key in [key for key in self.running if key[0] == request_id]:
            del self.running[key]
        return states
