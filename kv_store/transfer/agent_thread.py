"""The one thread that makes every call into a NIXL agent, and polls it.

An agent is not safe for two threads, its `transfer` copies in the caller, and without a progress thread nothing
moves unless somebody calls it, on the owner's side too: connections and reads over TCP need both ends to poll.
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TypeVar

import nixl._bindings as nixl_bindings
import torch
from nixl._api import nixl_agent, nixl_agent_config

from kv_store.transfer.flight import Flight, Piece
from messages.errors import PeerUnreachable, TransferError

log = logging.getLogger(__name__)
# It prints a line per agent on stdout.
logging.getLogger("nixl").setLevel(logging.WARNING)

T = TypeVar("T")

BUSY_POLL_S = 0.001
"""While a read is in flight or a peer may read from us."""
IDLE_POLL_S = 0.005
"""Peers may connect at any time; 5 ms keep an idle agent near 1 % of a core."""
CLOSE_WAIT_S = 1.0

_NIXL_ERRORS: tuple[type[Exception], ...] = tuple(
    kind for name, kind in vars(nixl_bindings).items() if name.startswith("nixl") and name.endswith("Error")
)


class AgentThread:
    """Owns a NIXL agent from birth to the end of the process.

    Raises:
        TransferError: The agent could not be made or did not take the memory.
    """

    def __init__(self, agent_name: str, buffers: list[torch.Tensor]) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._flights: list[Flight] = []
        self._num_readers = 0
        self._progressed_s = -math.inf
        self._local_kind = memory_kind(is_device=buffers[0].device.type != "cpu")
        started: Future[bytes] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(agent_name, buffers, started), name=f"nixl-{agent_name}", daemon=True
        )
        self._thread.start()
        self.metadata = started.result()

    @property
    def is_alive(self) -> bool:
        """Whether the agent is still polled."""
        return self._thread.is_alive()

    def expect_readers(self, num_readers: int) -> None:
        """Poll faster while peers are likely to read from us."""
        self._num_readers = num_readers

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Run `call` on the thread.

        Raises:
            PeerUnreachable: The transport is closed.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except TransferError as error:
                future.set_exception(error)

        self._put(run)
        return future

    def start(self, flight: Flight) -> None:
        """Fly; its futures tell the rest.

        Raises:
            PeerUnreachable: The transport is closed.
        """
        self._put(lambda: self._flights.append(flight))

    def close(self) -> None:
        """Stop the thread; the agent itself lives until the process ends.

        Destroying it would unmap memory under reads that are not proven over, and crashes at the interpreter's exit.
        """
        self._calls.put(None)
        self._thread.join(CLOSE_WAIT_S)

    def _put(self, call: Callable[[], None]) -> None:
        if not self.is_alive:
            raise PeerUnreachable("the transport is closed")
        self._calls.put(call)

    # On the thread

    def add_peer(self, metadata: bytes) -> None:
        """Load a peer."""
        with _translated():
            self._agent.add_remote_agent(metadata)

    def remove_peer(self, peer: str) -> None:
        """Unmap a peer's memory."""
        with _translated():
            self._agent.remove_remote_agent(peer)

    def post(self, peer: str, piece: Piece) -> tuple[object, str]:
        """See `TransferAgent.post`."""
        with _translated():
            local = self._agent.get_xfer_descs(piece.local, self._local_kind)
            remote = self._agent.get_xfer_descs(piece.remote, memory_kind(is_device=piece.is_remote_device))
            handle = self._agent.initialize_xfer("READ", local, remote, peer)
        try:
            return handle, self._agent.transfer(handle)
        except _NIXL_ERRORS as error:
            log.info("read.failed agent=%s error=%s", peer, error)
            return handle, "ERR"

    def state(self, handle: object) -> str:
        """See `TransferAgent.state`."""
        try:
            state: str = self._agent.check_xfer_state(handle)
        except _NIXL_ERRORS:
            return "ERR"
        return state

    def release(self, handle: object) -> bool:
        """See `TransferAgent.release`."""
        try:
            self._agent.release_xfer_handle(handle)
        except _NIXL_ERRORS:
            return False
        return True

    def _run(self, agent_name: str, buffers: list[torch.Tensor], started: "Future[bytes]") -> None:
        try:
            with _translated():
                self._agent = nixl_agent(agent_name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
                for buffer in buffers:
                    self._agent.register_memory(buffer)
                metadata: bytes = self._agent.get_agent_metadata()
        except TransferError as error:
            started.set_exception(error)
            return
        started.set_result(metadata)
        try:
            while self._turn():
                pass
        finally:
            for flight in self._flights:
                flight.abandon(PeerUnreachable("the transport is closed", agent_name=flight.peer))

    def _turn(self) -> bool:
        try:
            call = self._calls.get(timeout=self._pause_s())
        except queue.Empty:
            pass
        else:
            if call is None:
                return False
            call()
        self._progress()
        self._flights = [flight for flight in self._flights if not flight.advance(self)]
        return True

    def _progress(self) -> None:
        """Move what is under way in both directions, at most once per `BUSY_POLL_S`: posting and asking do it too."""
        now_s = time.monotonic()
        if now_s - self._progressed_s < BUSY_POLL_S:
            return
        self._progressed_s = now_s
        # Nobody sends us notifications, and a dead peer shows in its own flights.
        with suppress(*_NIXL_ERRORS):
            self._agent.get_new_notifs()

    def _pause_s(self) -> float:
        if any(flight.has_pieces for flight in self._flights):
            return 0.0
        return BUSY_POLL_S if self._flights or self._num_readers else IDLE_POLL_S


def memory_kind(*, is_device: bool) -> str:
    """Name of a kind of memory in the library's words."""
    return "VRAM" if is_device else "DRAM"


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except _NIXL_ERRORS as error:
        kind = PeerUnreachable if "DISCONNECT" in str(error) else TransferError
        raise kind("the transfer library refused", cause=str(error)) from error
