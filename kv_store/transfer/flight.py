"""One read on its way: several transfer handles, and the proof that no byte of it can land any more.

A handle may only be released when it has left PROC. Releasing it earlier reports success, yet over a software path
(TCP) the peer's answer still lands in the destination later; tried with a stopped owner, and also after the peer had
been removed. So a read that is given up goes on being polled until it is done, or until the peer's death fails it.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from messages.errors import PeerUnreachable, TransferError, TransferTimeout

Descriptors = NDArray[np.uint64]
"""(n, 3): address, size in bytes, device index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one transfer handle reads; row i of `remote` goes to row i of `local`."""

    local: Descriptors
    remote: Descriptors
    is_remote_device: bool
    """The peer's memory is an accelerator's."""


class TransferAgent(Protocol):
    """The calls into the transfer library that a flight makes, each from the agent's own thread."""

    def post(self, peer: str, piece: Piece) -> tuple[object, str]:
        """Start a read; gives its handle and state.

        Raises:
            TransferError: Nothing was started.
        """
        ...

    def state(self, handle: object) -> str:
        """DONE, PROC or ERR."""
        ...

    def release(self, handle: object) -> bool:
        """Free a handle that is not in PROC; False: try again later."""
        ...


class Flight:
    """A read in pieces; `quiet` is done when each posted piece is over and its handle is released.

    Made on the event loop; everything but the two futures belongs to the agent's thread.
    """

    def __init__(self, peer: str, pieces: list[Piece], loop: asyncio.AbstractEventLoop) -> None:
        self.peer = peer
        self.outcome: asyncio.Future[TransferError | None] = loop.create_future()
        """None: every byte is here."""
        self.quiet: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._pieces = deque(pieces)
        self._posted: list[object] = []
        self._over: list[object] = []
        self._error: TransferError | None = None

    @property
    def has_pieces(self) -> bool:
        """Whether there is more to post."""
        return bool(self._pieces)

    def give_up(self, error: TransferError) -> None:
        """Post nothing more; what was posted goes on until it is over."""
        self._pieces.clear()
        self._error = self._error or error

    def expire(self) -> None:
        """Its time is over: the reader stops waiting; called on the event loop."""
        if not self.outcome.done():
            self.outcome.set_result(TransferTimeout("a read passed its deadline", agent_name=self.peer))

    def abandon(self, error: TransferError) -> None:
        """Nobody polls any more: tell the reader, and never call the destination quiet."""
        self.give_up(error)
        self._call(self._tell)

    def advance(self, agent: TransferAgent) -> bool:
        """Post one piece, look at the posted ones; True when the flight is over."""
        if self._pieces:
            self._post(agent)
        if self._posted:
            self._look(agent)
        self._over = [handle for handle in self._over if not agent.release(handle)]
        if self._pieces or self._posted or self._over:
            return False
        self._call(self._settle)
        return True

    def _look(self, agent: TransferAgent) -> None:
        states = [(handle, agent.state(handle)) for handle in self._posted]
        if any(state == "ERR" for _, state in states):
            self.give_up(PeerUnreachable("the peer is gone or its memory cannot be read", agent_name=self.peer))
        self._posted = [handle for handle, state in states if state == "PROC"]
        self._over += [handle for handle, state in states if state != "PROC"]

    def _post(self, agent: TransferAgent) -> None:
        try:
            handle, state = agent.post(self.peer, self._pieces.popleft())
        except TransferError as error:
            self.give_up(error)
            return
        # A finished one need not be asked again; DONE is the usual state between processes of one machine.
        (self._over if state == "DONE" else self._posted).append(handle)

    def _tell(self) -> None:
        if not self.outcome.done():
            self.outcome.set_result(self._error)

    def _settle(self) -> None:
        self._tell()
        if not self.quiet.done():
            self.quiet.set_result(None)

    def _call(self, callback: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)
