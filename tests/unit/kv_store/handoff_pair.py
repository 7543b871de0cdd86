"""A prefill and a decode worker in one process, for tests of the reader."""

from collections.abc import Sequence

import torch

from kv_store.handoff import BlockGroups, HandoffTable
from kv_store.handoff_local import LocalHandoffOwner
from kv_store.handoff_reader import ArenaGeometry, HandoffReader, LocalGroups
from kv_store.transfer.digest import BlockDigester
from kv_store.transfer.loopback import LoopbackNetwork, LoopbackTransport
from kv_store.transfer.protocol import ByteRange
from messages.handoff import BlockId, BlockKey, BlockRef, Handoff
from messages.requests import RequestId

BLOCK_BYTES = (64, 48)
REMOTE_OFFSETS = (0, 1024)
LOCAL_OFFSETS = (256, 2048)
GEOMETRY = ArenaGeometry(group_offsets=LOCAL_OFFSETS, block_bytes=BLOCK_BYTES, block_size=16)
SIZE = 4096


class RecordingTransport(LoopbackTransport):
    """Remembers what was asked of it."""

    def __init__(self, name: str, buffer: torch.Tensor, network: LoopbackNetwork) -> None:
        super().__init__(name, buffer, network, connect_timeout_s=0.2)
        self.reads: list[list[ByteRange]] = []

    async def read(self, agent_name: str, ranges: Sequence[ByteRange], *, deadline_s: float) -> int:
        self.reads.append(list(ranges))
        return await super().read(agent_name, ranges, deadline_s=deadline_s)


class Pair:
    """A prefill and a decode worker in one process, on a clock that the test turns."""

    def __init__(self, lease_s: float = 30.0) -> None:
        self.now_s = 0.0
        self.network = LoopbackNetwork()
        self.source = (torch.arange(SIZE) % 251).to(torch.uint8)
        self.local = torch.full((SIZE,), 255, dtype=torch.uint8)
        self.table = HandoffTable(worker_id="p", incarnation="1", address="a", fingerprint="f", lease_s=lease_s)
        owner_side = LoopbackTransport("p-1", self.source, self.network)
        self.owner = LocalHandoffOwner(self.table, owner_side, REMOTE_OFFSETS, lambda: self.now_s)
        self.transport = RecordingTransport("d-1", self.local, self.network)

    def grant(self, groups: BlockGroups, num_tokens: int, request_id: str = "r") -> Handoff:
        return self.table.grant(RequestId(request_id), groups, num_tokens, self.now_s)

    def reader(self, handoff: Handoff, local: LocalGroups, deadline_s: float = 5.0) -> HandoffReader:
        return HandoffReader(handoff, self.owner, self.transport, GEOMETRY, local, deadline_s)

    def has_block(self, group: int, remote_id: int, local_id: int) -> bool:
        size = BLOCK_BYTES[group]
        start, end = REMOTE_OFFSETS[group] + remote_id * size, LOCAL_OFFSETS[group] + local_id * size
        return torch.equal(self.source[start : start + size], self.local[end : end + size])

    @property
    def num_written(self) -> int:
        return int((self.local != 255).sum())


class DigestPair(Pair):
    """Both sides digest their blocks."""

    def __init__(self, lease_s: float = 30.0, *, has_owner_digests: bool = True) -> None:
        super().__init__(lease_s)
        self.theirs = BlockDigester(self.source, REMOTE_OFFSETS, BLOCK_BYTES)
        if has_owner_digests:
            self.owner = self.digesting_owner()
        ours = BlockDigester(self.local, LOCAL_OFFSETS, BLOCK_BYTES)
        self.geometry = ArenaGeometry(
            group_offsets=LOCAL_OFFSETS, block_bytes=BLOCK_BYTES, block_size=16, digest=ours.digest
        )

    def digesting_owner(self) -> LocalHandoffOwner:
        inner = self.owner
        return LocalHandoffOwner(self.table, inner._transport, REMOTE_OFFSETS, inner._clock, self.theirs.digest)

    def reader(self, handoff: Handoff, local: LocalGroups, deadline_s: float = 5.0) -> HandoffReader:
        return HandoffReader(handoff, self.owner, self.transport, self.geometry, local, deadline_s)


def refs(*ids: int | None) -> tuple[BlockRef | None, ...]:
    return tuple(
        None if number is None else BlockRef(block_id=BlockId(number), key=BlockKey(bytes([number]))) for number in ids
    )


def ids(*numbers: int | None) -> tuple[BlockId | None, ...]:
    return tuple(None if number is None else BlockId(number) for number in numbers)
