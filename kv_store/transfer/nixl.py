"""The transport over NIXL and UCX: shared memory on one machine, TCP, RDMA or NVLink between machines.

Create it only in a process that ends by `os._exit`: the library crashes in the interpreter's own exit.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch

from kv_store.transfer.agent_thread import AgentThread
from kv_store.transfer.flight import Flight, Piece
from kv_store.transfer.peer_memory import PeerMemory
from kv_store.transfer.protocol import ByteRange, check_ranges, cut, mark_busy
from messages.errors import PeerUnreachable, TransferError

log = logging.getLogger(__name__)

MAX_PIECE_BYTES = 32 << 20
"""Most that one call copies before the agent's thread looks at anything else, about 5 ms."""
QUIET_WAIT_S = 1.0
"""How long a cancelled read or a disconnect waits for the proof that nothing is written any more."""
_PROBE_BYTES = 64


@dataclass(slots=True, eq=False)
class _Peer:
    memory: PeerMemory
    added: "asyncio.Future[None]"
    flights: set[Flight] = field(default_factory=set)
    probe: Flight | None = None
    leaving: "asyncio.Task[None] | None" = None

    @property
    def is_warm(self) -> bool:
        probe = self.probe
        return probe is not None and probe.outcome.done() and probe.outcome.result() is None


class NixlTransport:
    """A BlockTransport whose agent lives as long as the process.

    Args:
        agent_name: Worker and incarnation; the library refuses a name that a peer has seen before.
        buffer: The arena, 1-D uint8, registered once.
        connect_timeout_s: How long a new peer may take to answer.
    """

    def __init__(self, agent_name: str, buffer: torch.Tensor, connect_timeout_s: float = 5.0) -> None:
        self._agent_name = agent_name
        self._buffer = buffer
        self._connect_timeout_s = connect_timeout_s
        # The first transfer to a peer sets the connection up; it must not write into the arena.
        self._probe_buffer = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=buffer.device)
        self._device_index = buffer.device.index or 0
        self._thread = AgentThread(agent_name, [buffer, self._probe_buffer])
        self._peers: dict[str, _Peer] = {}

    @property
    def agent_name(self) -> str:
        """See `BlockTransport.agent_name`."""
        return self._agent_name

    @property
    def num_peers(self) -> int:
        """See `BlockTransport.num_peers`."""
        return len(self._peers)

    @property
    def is_alive(self) -> bool:
        """Whether the agent's thread still runs."""
        return self._thread.is_alive

    def metadata(self) -> bytes:
        """See `BlockTransport.metadata`."""
        memory = PeerMemory(
            agent_name=self._agent_name,
            base_address=self._buffer.data_ptr(),
            size_bytes=self._buffer.numel(),
            is_device=self._buffer.device.type != "cpu",
            device_index=self._device_index,
            agent_metadata=self._thread.metadata,
        )
        return memory.to_bytes()

    def expect_readers(self, num_readers: int) -> None:
        """Say how many peers are likely to read from us now; above 0 the agent polls faster.

        Between processes of one machine it changes little; over TCP each read needs the owner's polls.
        """
        self._thread.expect_readers(num_readers)

    async def connect(self, agent_name: str, metadata: bytes) -> None:
        """See `BlockTransport.connect`."""
        memory = PeerMemory.from_bytes(metadata)
        if memory.agent_name != agent_name:
            raise TransferError("the metadata belongs to another agent", agent_name=agent_name)
        peer = self._peers.get(agent_name)
        if peer is not None and peer.leaving is not None:
            await asyncio.wait([peer.leaving], timeout=self._connect_timeout_s)
            peer = self._peers.get(agent_name)
        peer = peer or self._add(agent_name, memory)
        if peer.leaving is not None:
            raise PeerUnreachable("reads of the peer's last connection are not over", agent_name=agent_name)
        try:
            await asyncio.shield(peer.added)
        except TransferError:
            self._peers.pop(agent_name, None)
            raise
        if not peer.is_warm:
            await self._warm(agent_name, peer)

    async def read(self, agent_name: str, ranges: Sequence[ByteRange], *, deadline_s: float) -> int:
        """See `BlockTransport.read`."""
        peer = self._peers.get(agent_name)
        if peer is None or peer.leaving is not None or not peer.is_warm:
            raise PeerUnreachable("the peer is not connected", agent_name=agent_name)
        total = check_ranges(ranges, local_size=self._buffer.numel(), remote_size=peer.memory.size_bytes)
        if not ranges:
            return 0
        pieces = [self._piece(peer.memory, group) for group in cut(ranges, MAX_PIECE_BYTES)]
        flight = self._start(agent_name, peer, pieces)
        # Cheaper than a wait with a timeout, which small reads would feel.
        timer = asyncio.get_running_loop().call_later(deadline_s, flight.expire)
        try:
            failure = await flight.outcome
        except asyncio.CancelledError as error:
            self._give_up(flight, TransferError("the read was cancelled", agent_name=agent_name))
            await self._until_quiet(flight, error)
            raise
        finally:
            timer.cancel()
        if failure is not None:
            self._give_up(flight, failure)
            mark_busy(failure, flight.quiet)
            if isinstance(failure, PeerUnreachable):
                # The library never mends a connection; connecting again makes a new one.
                self._leave(agent_name, peer)
            raise failure
        return total

    async def disconnect(self, agent_name: str) -> None:
        """See `BlockTransport.disconnect`."""
        peer = self._peers.get(agent_name)
        if peer is not None:
            await asyncio.wait([self._leave(agent_name, peer)], timeout=QUIET_WAIT_S)

    def close(self) -> None:
        """See `BlockTransport.close`."""
        self._thread.close()

    def _add(self, agent_name: str, memory: PeerMemory) -> _Peer:
        added = self._thread.submit(lambda: self._thread.add_peer(memory.agent_metadata))
        peer = _Peer(memory=memory, added=asyncio.wrap_future(added))
        self._peers[agent_name] = peer
        return peer

    async def _warm(self, agent_name: str, peer: _Peer) -> None:
        if peer.probe is None:
            size = min(_PROBE_BYTES, peer.memory.size_bytes)
            local = np.array([(self._probe_buffer.data_ptr(), size, self._device_index)], dtype=np.uint64)
            remote = np.array([(peer.memory.base_address, size, peer.memory.device_index)], dtype=np.uint64)
            piece = Piece(local=local, remote=remote, is_remote_device=peer.memory.is_device)
            peer.probe = self._start(agent_name, peer, [piece])
        done, _ = await asyncio.wait([peer.probe.outcome], timeout=self._connect_timeout_s)
        if not done:
            raise PeerUnreachable("the peer does not answer", agent_name=agent_name)
        failure = peer.probe.outcome.result()
        if failure is not None:
            await self.disconnect(agent_name)
            raise failure

    def _start(self, agent_name: str, peer: _Peer, pieces: list[Piece]) -> Flight:
        flight = Flight(agent_name, pieces, asyncio.get_running_loop())
        peer.flights.add(flight)
        flight.quiet.add_done_callback(lambda _: peer.flights.discard(flight))
        self._thread.start(flight)
        return flight

    def _give_up(self, flight: Flight, error: TransferError) -> None:
        # A closed transport has told every flight already.
        with suppress(PeerUnreachable):
            self._thread.submit(lambda: flight.give_up(error))

    def _leave(self, agent_name: str, peer: _Peer) -> "asyncio.Task[None]":
        if peer.leaving is None:
            for flight in peer.flights:
                self._give_up(flight, PeerUnreachable("the peer was forgotten", agent_name=agent_name))
            peer.leaving = asyncio.create_task(self._remove(agent_name, peer), name=f"forget-{agent_name}")
        return peer.leaving

    async def _until_quiet(self, flight: Flight, error: BaseException) -> None:
        mark_busy(error, flight.quiet)
        try:
            await asyncio.wait([flight.quiet], timeout=QUIET_WAIT_S)
        except asyncio.CancelledError as second:
            mark_busy(second, flight.quiet)
            raise

    async def _remove(self, agent_name: str, peer: _Peer) -> None:
        if peer.flights:
            await asyncio.wait([flight.quiet for flight in peer.flights])
        try:
            await asyncio.wrap_future(self._thread.submit(lambda: self._thread.remove_peer(agent_name)))
        except TransferError as error:
            log.warning("peer.kept agent=%s error=%s", agent_name, error)
        if self._peers.get(agent_name) is peer:
            del self._peers[agent_name]

    def _piece(self, memory: PeerMemory, ranges: Sequence[ByteRange]) -> Piece:
        local_base = self._buffer.data_ptr()
        local = [(local_base + piece.local_offset, piece.size, self._device_index) for piece in ranges]
        remote = [(memory.base_address + piece.remote_offset, piece.size, memory.device_index) for piece in ranges]
        return Piece(
            local=np.array(local, dtype=np.uint64),
            remote=np.array(remote, dtype=np.uint64),
            is_remote_device=memory.is_device,
        )
