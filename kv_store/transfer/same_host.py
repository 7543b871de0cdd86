"""A transport that reads peers of the same machine by a plain copy, and all others through the one that it wraps.

Between processes the kernel copies through both address spaces page by page, which for a read below a few MB takes
longer than the copy itself (docs/performance.md). Memory that both have mapped needs neither the kernel nor the owner:
such a read cannot hang, and a stopped owner does not hold it up. It may bring bytes that the owner has reused, as any
one-sided read; Close says so.
"""

import asyncio
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from kv_store.transfer.peer_memory import PeerMemory
from kv_store.transfer.protocol import BlockTransport, ByteRange, check_ranges, cut, mark_busy
from kv_store.transfer.shared_memory import PeerMapping, SharedAddress, SharedBuffer
from kv_store.transfer.wrapper import WrappedTransport
from messages.errors import PeerUnreachable, TransferError, TransferTimeout

INLINE_BYTES = 16 << 20
"""A copy of so much takes 1 to 2 ms; waking a thread and being woken by it takes as long where cores idle."""
PIECE_BYTES = 8 << 20
"""Copied between two looks at whether the read goes on, about 1 ms."""
QUIET_WAIT_S = 1.0
_HEADER = struct.Struct("<4sI")
_MAGIC = b"KVS1"


class SameHostTransport(WrappedTransport):
    """A BlockTransport; peers that it cannot map are read through `inner`.

    Args:
        inner: Reads over the network; its memory is `shared.tensor`.
        buffer: The arena, a part of `shared.tensor`, 1-D uint8.
        shared: What peers map.
    """

    def __init__(self, inner: BlockTransport, buffer: torch.Tensor, shared: SharedBuffer) -> None:
        super().__init__(inner)
        self._local: NDArray[np.uint8] = buffer.numpy()
        self._shared = shared
        self._offset = buffer.data_ptr() - shared.tensor.data_ptr()
        self._peers: dict[str, _MappedPeer] = {}
        self._mapping: dict[str, asyncio.Task[PeerMapping | None]] = {}
        """Peers that are being mapped, or were and nobody has taken it in."""
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="same-host-copy")

    @property
    def num_peers(self) -> int:
        """See `BlockTransport.num_peers`."""
        return self._inner.num_peers + len(self._peers)

    def metadata(self) -> bytes:
        """See `BlockTransport.metadata`; where the shared memory is comes before what `inner` says."""
        address = self._shared.address.to_bytes()
        return _HEADER.pack(_MAGIC, len(address)) + address + struct.pack("<Q", self._offset) + self._inner.metadata()

    async def connect(self, agent_name: str, metadata: bytes) -> None:
        """See `BlockTransport.connect`."""
        address, offset, rest = _unpack(metadata)
        memory = PeerMemory.from_bytes(rest)
        if memory.agent_name != agent_name:
            raise TransferError("the metadata belongs to another agent", agent_name=agent_name)
        if address is not None and offset + memory.size_bytes > address.size_bytes:
            raise TransferError("the arena leaves the shared memory", agent_name=agent_name)
        known = self._peers.get(agent_name)
        if known is not None:
            if known.mapping.is_alive:
                return
            self._forget(agent_name)
        if address is None or not await self._map(agent_name, address, (offset, memory.size_bytes)):
            await self._inner.connect(agent_name, rest)

    async def read(self, agent_name: str, ranges: Sequence[ByteRange], *, deadline_s: float) -> int:
        """See `BlockTransport.read`."""
        peer = self._peers.get(agent_name)
        if peer is None:
            return await self._inner.read(agent_name, ranges, deadline_s=deadline_s)
        total = check_ranges(ranges, local_size=len(self._local), remote_size=peer.size_bytes)
        if total <= INLINE_BYTES:
            _copy(ranges, peer.remote, self._local)
        else:
            await self._copy_in_thread(agent_name, peer, ranges, deadline_s)
        if not peer.mapping.is_alive:
            self._forget(agent_name)
            raise PeerUnreachable("the peer is gone", agent_name=agent_name)
        return total

    async def disconnect(self, agent_name: str) -> None:
        """See `BlockTransport.disconnect`."""
        self._forget(agent_name)
        await self._inner.disconnect(agent_name)

    def close(self) -> None:
        """See `BlockTransport.close`."""
        for agent_name in [*self._peers, *self._mapping]:
            self._forget(agent_name)
        self._threads.shutdown(wait=True)
        self._inner.close()

    async def _map(self, agent_name: str, address: SharedAddress, place: tuple[int, int]) -> bool:
        """Map a peer's memory, in a thread, because a large arena takes some 10 ms; False: it cannot be.

        Raises:
            PeerUnreachable: It was forgotten meanwhile.
        """
        task = self._mapping.get(agent_name)
        if task is None:
            task = self._mapping[agent_name] = asyncio.create_task(asyncio.to_thread(PeerMapping.open, address))
        mapping = await asyncio.shield(task)
        if self._mapping.get(agent_name) is task:
            del self._mapping[agent_name]
            if mapping is not None:
                self._peers[agent_name] = _MappedPeer(mapping, *place)
        if mapping is not None and agent_name not in self._peers:
            raise PeerUnreachable("the peer was forgotten", agent_name=agent_name)
        return mapping is not None

    def _forget(self, agent_name: str) -> None:
        peer = self._peers.pop(agent_name, None)
        if peer is not None:
            peer.close()
        task = self._mapping.pop(agent_name, None)
        if task is not None:
            task.add_done_callback(_unmap)

    async def _copy_in_thread(
        self, agent_name: str, peer: "_MappedPeer", ranges: Sequence[ByteRange], deadline_s: float
    ) -> None:
        stop = threading.Event()
        try:
            copying = asyncio.get_running_loop().run_in_executor(
                self._threads, peer.copy_in_pieces, ranges, self._local, stop
            )
        except RuntimeError:
            raise PeerUnreachable("the transport is closed", agent_name=agent_name) from None
        try:
            done, _ = await asyncio.wait([copying], timeout=deadline_s)
        except asyncio.CancelledError as error:
            stop.set()
            await self._until_quiet(copying, error)
            raise
        if not done:
            stop.set()
            late = TransferTimeout("a read passed its deadline", agent_name=agent_name)
            await self._until_quiet(copying, late)
            raise late
        if not copying.result():
            raise PeerUnreachable("the peer was forgotten", agent_name=agent_name)

    @staticmethod
    async def _until_quiet(copying: "asyncio.Future[bool]", error: BaseException) -> None:
        """Wait for the piece that is being copied, a millisecond; nothing is written after it."""
        quiet: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def settle(_: object) -> None:
            if not quiet.done():
                quiet.set_result(None)

        copying.add_done_callback(settle)
        try:
            await asyncio.wait([quiet], timeout=QUIET_WAIT_S)
        except asyncio.CancelledError as second:
            mark_busy(second, quiet)
            raise
        mark_busy(error, quiet)


class _MappedPeer:
    """One peer's arena inside what is mapped of it."""

    def __init__(self, mapping: PeerMapping, offset: int, size_bytes: int) -> None:
        self.mapping = mapping
        self.size_bytes = size_bytes
        self.is_gone = False
        self.remote = mapping.bytes[offset : offset + size_bytes]

    def close(self) -> None:
        """Copy no more pieces, and unmap; a piece that is being copied keeps the memory until it is."""
        self.is_gone = True
        self.remote = self.remote[:0].copy()
        self.mapping.close()

    def copy_in_pieces(self, ranges: Sequence[ByteRange], local: NDArray[np.uint8], stop: threading.Event) -> bool:
        """Copy all ranges; False when it was told to stop, or the peer was forgotten, before the end."""
        remote = self.remote
        for part in cut(ranges, PIECE_BYTES):
            if stop.is_set() or self.is_gone:
                return False
            _copy(part, remote, local)
        return True


def _unmap(task: "asyncio.Task[PeerMapping | None]") -> None:
    mapping = None if task.cancelled() or task.exception() is not None else task.result()
    if mapping is not None:
        mapping.close()


def _copy(ranges: Sequence[ByteRange], remote: NDArray[np.uint8], local: NDArray[np.uint8]) -> None:
    for piece in ranges:
        source = remote[piece.remote_offset : piece.remote_offset + piece.size]
        local[piece.local_offset : piece.local_offset + piece.size] = source


def _unpack(metadata: bytes) -> tuple[SharedAddress | None, int, bytes]:
    """The address of the shared memory, where the arena begins in it, and what the other transport says.

    A peer that shares nothing sends only the last.

    Raises:
        TransferError: It is cut short, or malformed.
    """
    if not metadata.startswith(_MAGIC):
        return None, 0, metadata
    end = _HEADER.size + (_HEADER.unpack_from(metadata)[1] if len(metadata) >= _HEADER.size else 0)
    if len(metadata) < end + 8:
        raise TransferError("truncated metadata of a peer", size_bytes=len(metadata))
    (offset,) = struct.unpack_from("<Q", metadata, end)
    return SharedAddress.from_bytes(metadata[_HEADER.size : end]), offset, metadata[end + 8 :]
