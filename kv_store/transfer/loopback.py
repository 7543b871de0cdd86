"""The transport inside one process: a read is a copy between two registered buffers.

It keeps the same promises as the real one, and can play a stopped or a dead owner.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kv_store.transfer.peer_memory import PeerMemory
from kv_store.transfer.protocol import ByteRange, check_ranges, mark_busy
from messages.errors import PeerUnreachable, TransferError, TransferTimeout

CANCEL_WAIT_S = 1.0


@dataclass(slots=True)
class _Agent:
    buffer: torch.Tensor
    running: asyncio.Event = field(default_factory=asyncio.Event)


class LoopbackNetwork:
    """The agents that can see each other, by name."""

    def __init__(self) -> None:
        self._agents: dict[str, _Agent] = {}

    def stop(self, agent_name: str) -> None:
        """Let reads from an agent hang, as if its process had been stopped."""
        self._agents[agent_name].running.clear()

    def resume(self, agent_name: str) -> None:
        """Let an agent answer again; reads that hang go on and write their destination."""
        self._agents[agent_name].running.set()

    def kill(self, agent_name: str) -> None:
        """Remove an agent for ever; reads from it fail."""
        agent = self._agents.pop(agent_name, None)
        if agent is not None:
            agent.running.set()

    def join(self, agent_name: str, buffer: torch.Tensor) -> None:
        """Add an agent.

        Raises:
            TransferError: The name is taken.
        """
        if agent_name in self._agents:
            raise TransferError("an agent name is never used again", agent_name=agent_name)
        agent = _Agent(buffer)
        agent.running.set()
        self._agents[agent_name] = agent

    async def buffer_of(self, agent_name: str) -> torch.Tensor:
        """Memory of an agent, once it answers.

        Raises:
            PeerUnreachable: There is no such agent, or it was killed meanwhile.
        """
        agent = self._agents.get(agent_name)
        if agent is not None:
            await agent.running.wait()
            agent = self._agents.get(agent_name)
        if agent is None:
            raise PeerUnreachable("the agent is gone", agent_name=agent_name)
        return agent.buffer


class LoopbackTransport:
    """A BlockTransport to the other transports of one `LoopbackNetwork`."""

    def __init__(
        self, agent_name: str, buffer: torch.Tensor, network: LoopbackNetwork, connect_timeout_s: float = 5.0
    ) -> None:
        network.join(agent_name, buffer)
        self._agent_name = agent_name
        self._buffer = buffer
        self._network = network
        self._connect_timeout_s = connect_timeout_s
        self._peer_sizes: dict[str, int] = {}
        self._copies: set[asyncio.Task[None]] = set()

    @property
    def agent_name(self) -> str:
        """See `BlockTransport.agent_name`."""
        return self._agent_name

    @property
    def num_peers(self) -> int:
        """See `BlockTransport.num_peers`."""
        return len(self._peer_sizes)

    def metadata(self) -> bytes:
        """See `BlockTransport.metadata`."""
        memory = PeerMemory(
            agent_name=self._agent_name,
            base_address=self._buffer.data_ptr(),
            size_bytes=self._buffer.numel(),
            is_device=False,
            device_index=0,
            agent_metadata=b"loopback",
        )
        return memory.to_bytes()

    def expect_readers(self, num_readers: int) -> None:
        """See `BlockTransport.expect_readers`; here readers need no help."""

    async def connect(self, agent_name: str, metadata: bytes) -> None:
        """See `BlockTransport.connect`."""
        memory = PeerMemory.from_bytes(metadata)
        if memory.agent_name != agent_name:
            raise TransferError("the metadata belongs to another agent", agent_name=agent_name)
        try:
            # Not wait_for: it forgets a cancellation that comes together with the answer.
            async with asyncio.timeout(self._connect_timeout_s):
                await self._network.buffer_of(agent_name)
        except TimeoutError as error:
            raise PeerUnreachable("the peer does not answer", agent_name=agent_name) from error
        self._peer_sizes[agent_name] = memory.size_bytes

    async def read(self, agent_name: str, ranges: Sequence[ByteRange], *, deadline_s: float) -> int:
        """See `BlockTransport.read`."""
        remote_size = self._peer_sizes.get(agent_name)
        if remote_size is None:
            raise PeerUnreachable("the peer is not connected", agent_name=agent_name)
        total = check_ranges(ranges, local_size=self._buffer.numel(), remote_size=remote_size)
        copy = asyncio.create_task(self._copy(agent_name, ranges), name=f"read-{agent_name}")
        self._copies.add(copy)
        copy.add_done_callback(self._copies.discard)
        try:
            done, _ = await asyncio.wait([copy], timeout=deadline_s)
        except asyncio.CancelledError as error:
            await asyncio.wait([copy], timeout=CANCEL_WAIT_S)
            mark_busy(error, _quiet_after(copy))
            raise
        if not done:
            timeout = TransferTimeout("a read passed its deadline", agent_name=agent_name, deadline_s=deadline_s)
            mark_busy(timeout, _quiet_after(copy))
            raise timeout
        copy.result()
        return total

    async def disconnect(self, agent_name: str) -> None:
        """See `BlockTransport.disconnect`."""
        self._peer_sizes.pop(agent_name, None)

    def close(self) -> None:
        """See `BlockTransport.close`."""
        self._peer_sizes.clear()
        self._network.kill(self._agent_name)

    async def _copy(self, agent_name: str, ranges: Sequence[ByteRange]) -> None:
        for piece in ranges:
            source = await self._network.buffer_of(agent_name)
            data = source[piece.remote_offset : piece.remote_offset + piece.size]
            self._buffer[piece.local_offset : piece.local_offset + piece.size].copy_(data)
            # Other tasks see a read half done, as they do with the real transport.
            await asyncio.sleep(0)


def _quiet_after(copy: "asyncio.Task[None]") -> "asyncio.Future[None]":
    quiet: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def settle(task: "asyncio.Task[None]") -> None:
        if not task.cancelled():
            # Looked at, so that a failure after the deadline is not reported as never retrieved.
            task.exception()
        if not quiet.done():
            quiet.set_result(None)

    copy.add_done_callback(settle)
    if copy.done():
        settle(copy)
    return quiet
