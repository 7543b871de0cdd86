"""The reader's side of one hand-off: Open, one-sided reads as blocks become complete, Close.

What was read is worth nothing before Close has answered "valid" (and its digests agree, where they are taken), and a
destination that a failed read may still write is not given back before it is quiet.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kv_store.handoff import BlockGroups, HandoffOwner
from kv_store.handoff_close import DigestBlock
from kv_store.lease import heartbeat_period_s
from kv_store.transfer.protocol import BlockTransport, ByteRange, destination_free
from messages.errors import HandoffError, HandoffStale, LayoutMismatch, TransferError
from messages.handoff import BlockId, BlockRef, Handoff, OpenReply

log = logging.getLogger(__name__)

LocalGroups = tuple[tuple[BlockId | None, ...], ...]
"""Per KV group, per logical block: where to put it; None: not wanted (held already, or a hole)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaGeometry:
    """Where blocks lie in the reader's registered arena."""

    group_offsets: tuple[int, ...]
    """Bytes from the start of the arena to block 0 of each KV group."""
    block_bytes: tuple[int, ...]
    """Size of one block of each KV group; the same at the owner, by fingerprint."""
    block_size: int
    """Tokens per block."""
    digest: DigestBlock | None = None
    """Digests a block here, in a thread, to be compared with the owner's; None: nothing is compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStats:
    """What one hand-off moved, and how much of it may be used."""

    blocks: int
    size_bytes: int
    seconds: float
    """Sum of the durations of the reads."""
    good_tokens: int
    """Leading prompt tokens all of whose wanted blocks were read, verified and declared valid by the owner: whole
    blocks, or the whole prompt."""
    digest_mismatches: int = 0
    """Blocks whose bytes differ from what the owner holds."""


@dataclass(frozen=True, slots=True, order=True)
class _Wanted:
    last_token: int
    """The block may be read when this many prompt tokens have their KV."""
    group: int
    index: int
    remote_id: BlockId
    local_id: BlockId


class HandoffReader:
    """Reads one hand-off once; after `close` or `abandon` it holds nothing at the owner.

    After a read that failed, `close` says how much of what came before it may be used; `abandon` then waits until the
    destinations of the failed read are quiet.

    Args:
        handoff: What the owner offers.
        owner: Answers the calls.
        transport: Connected to the owner, or connected by `open`.
        geometry: Where blocks lie here.
        local_groups: Where each block goes.
        read_deadline_s: Limit of each `read_through`.

    Raises:
        HandoffError: The two sides have different KV groups, or the owner offers fewer blocks than the prompt has.
    """

    def __init__(
        self,
        handoff: Handoff,
        owner: HandoffOwner,
        transport: BlockTransport,
        geometry: ArenaGeometry,
        local_groups: LocalGroups,
        read_deadline_s: float,
    ) -> None:
        self._handoff = handoff
        self._owner = owner
        self._transport = transport
        self._geometry = geometry
        self._read_deadline_s = read_deadline_s
        self._wanted = _wanted_blocks(handoff, local_groups, geometry.block_size)
        self._asked = tuple(self._wanted)
        self._read: dict[_Wanted, int | None] = {}
        """Blocks whose bytes have all arrived, with their digests."""
        self._first_hole = _first_hole(handoff, local_groups, geometry.block_size)
        self._reply: OpenReply | None = None
        self._heart: asyncio.Task[None] | None = None
        self._is_fenced = False
        self._has_failed = False
        self._is_over = False
        self._busy: list[asyncio.Future[None]] = []
        self._size_bytes = 0
        self._seconds = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the owner has been told that nothing more is read, or a try to tell it has failed."""
        return self._is_over

    def is_quiet(self) -> bool:
        """Whether no failed read can write into a destination any more."""
        return all(quiet.done() for quiet in self._busy)

    async def open(self) -> None:
        """Pin the wanted blocks at the owner and keep the lease alive from here on.

        Raises:
            HandoffError: The owner refuses; see `HandoffOwner.open`.
            TransferError: The owner does not answer, or its memory cannot be reached.
        """
        if self._reply is not None or self._is_over:
            raise HandoffError("a reader opens once", handoff_id=self._handoff.handoff_id)
        groups = _offered_and_wanted(self._handoff, self._wanted)
        reply = await self._owner.open(self._handoff, groups)
        self._reply = reply
        self._heart = asyncio.create_task(self._beat(reply), name=f"heartbeat-{self._handoff.handoff_id}")
        await self._transport.connect(reply.agent_name, reply.agent_metadata)

    async def read_through(self, complete_tokens: int) -> None:
        """Read every wanted block that lies within the first `complete_tokens` tokens and was not read before.

        Raises:
            HandoffStale: The owner has ended the lease, or a read has failed before.
            TransferError: The read failed; `abandon` waits until the destinations are quiet.
        """
        reply = self._opened()
        if self._has_failed:
            raise HandoffStale("a read of this hand-off has failed", handoff_id=self._handoff.handoff_id)
        ready = [block for block in self._wanted if block.last_token <= complete_tokens]
        if not ready:
            return
        self._wanted = [block for block in self._wanted if block.last_token > complete_tokens]
        started_s = time.monotonic()
        try:
            size_bytes = await self._transport.read(
                reply.agent_name, self._ranges(ready, reply), deadline_s=self._read_deadline_s
            )
        except (TransferError, asyncio.CancelledError) as error:
            self._has_failed = True
            quiet = destination_free(error)
            if quiet is not None:
                self._busy.append(quiet)
            raise
        self._seconds += time.monotonic() - started_s
        self._size_bytes += size_bytes
        self._read.update(zip(ready, await self._digests(ready), strict=True))

    async def close(self) -> ReadStats:
        """Ask whether what was read is valid; only what the answer calls good may be committed.

        Raises:
            HandoffStale: It is not; the destinations hold nothing of worth.
            HandoffError: Wanted blocks have not been read and no read has failed, or the owner takes no digests.
            PeerUnreachable: The owner does not answer.
        """
        reply = self._opened()
        if self._wanted and not self._has_failed:
            raise HandoffError("closed before everything was read", num_unread=len(self._wanted))
        answer = await self._owner.close(self._handoff, reply.generation)
        self._is_over = True
        await self._stop_heart()
        if not answer.is_valid:
            raise HandoffStale("the lease ended before the read did", handoff_id=self._handoff.handoff_id)
        changed = self._changed_blocks(answer.digests)
        bad = [block for block in self._asked if block not in self._read or block in changed]
        return ReadStats(
            blocks=len(self._read),
            size_bytes=self._size_bytes,
            seconds=self._seconds,
            good_tokens=self._tokens_before(bad),
            digest_mismatches=len(changed),
        )

    async def abandon(self, reason: str = "aborted") -> None:
        """Give the hand-off up from any state; returns when the owner was told and destinations are quiet.

        An owner that does not answer ends its lease by itself. A stopped owner can keep a destination busy until it
        goes on or dies: `is_quiet()` tells. Calling it again, also after a cancelled call, goes on waiting.
        """
        await self._stop_heart()
        if not self._is_over:
            self._is_over = True
            try:
                await self._owner.release(self._handoff, reason)
            except (TransferError, HandoffError) as error:
                log.info("handoff.release_failed handoff_id=%s error=%s", self._handoff.handoff_id, error)
        waiting = [quiet for quiet in self._busy if not quiet.done()]
        if waiting:
            await asyncio.wait(waiting)

    def _opened(self) -> OpenReply:
        if self._reply is None:
            raise HandoffError("the hand-off is not open", handoff_id=self._handoff.handoff_id)
        if self._is_fenced or self._is_over:
            raise HandoffStale("the hand-off is over", handoff_id=self._handoff.handoff_id)
        return self._reply

    async def _digests(self, blocks: list[_Wanted]) -> list[int | None]:
        digest = self._geometry.digest
        if digest is None:
            return [None] * len(blocks)
        return await asyncio.to_thread(lambda: [digest(block.group, block.local_id) for block in blocks])

    def _changed_blocks(self, digests: Sequence[int]) -> set[_Wanted]:
        """Blocks that arrived with other bytes than the owner holds."""
        if self._geometry.digest is None:
            return set()
        opened = sorted(self._asked, key=_place)
        if len(digests) != len(opened):
            raise HandoffError("the owner takes no digests of its blocks", handoff_id=self._handoff.handoff_id)
        theirs = zip(opened, digests, strict=True)
        return {block for block, digest in theirs if self._read.get(block, digest) != digest}

    def _tokens_before(self, bad: Sequence[_Wanted]) -> int:
        if not bad:
            return self._handoff.num_tokens
        # A window that ends earlier may need what the owner has no block for any more.
        first = min(*(block.index for block in bad), self._first_hole)
        return first * self._geometry.block_size

    def _ranges(self, blocks: Iterable[_Wanted], reply: OpenReply) -> list[ByteRange]:
        ranges: list[ByteRange] = []
        for block in sorted(blocks, key=_place):
            size = self._geometry.block_bytes[block.group]
            remote = reply.group_offsets[block.group] + block.remote_id * size
            local = self._geometry.group_offsets[block.group] + block.local_id * size
            last = ranges[-1] if ranges else None
            if last and last.remote_offset + last.size == remote and last.local_offset + last.size == local:
                last = ranges.pop()
                remote, local, size = last.remote_offset, last.local_offset, last.size + size
            ranges.append(ByteRange(remote_offset=remote, local_offset=local, size=size))
        return ranges

    async def _beat(self, reply: OpenReply) -> None:
        while not self._is_fenced:
            await asyncio.sleep(heartbeat_period_s(reply.lease_s))
            try:
                self._is_fenced = not await self._owner.heartbeat(self._handoff, reply.generation)
            except TransferError as error:
                # One lost heartbeat means nothing; when the lease runs out, Close says so.
                log.info("handoff.heartbeat_failed handoff_id=%s error=%s", self._handoff.handoff_id, error)

    async def _stop_heart(self) -> None:
        # A cancelled task keeps its frames, and they keep this reader: a cycle that only a full collection would find.
        heart, self._heart = self._heart, None
        if heart is not None:
            heart.cancel()
            await asyncio.wait([heart])


def _place(block: _Wanted) -> tuple[int, int]:
    return block.group, block.index


def _wanted_blocks(handoff: Handoff, local_groups: LocalGroups, block_size: int) -> list[_Wanted]:
    if len(local_groups) != len(handoff.groups):
        raise LayoutMismatch("the two sides have different KV groups", handoff_id=handoff.handoff_id)
    # What lies beyond the prompt is room for later tokens; a hole at the owner stays one here.
    num_blocks = -(-handoff.num_tokens // block_size)
    for refs, local_ids in zip(handoff.groups, local_groups, strict=True):
        if any(local_id is not None for local_id in local_ids[len(refs) : num_blocks]):
            raise HandoffError("the owner offers fewer blocks than the prompt has", handoff_id=handoff.handoff_id)
    return [
        _Wanted(min((index + 1) * block_size, handoff.num_tokens), group, index, ref.block_id, local_id)
        for group, (refs, local_ids) in enumerate(zip(handoff.groups, local_groups, strict=True))
        for index, (ref, local_id) in enumerate(zip(refs, local_ids[:num_blocks], strict=False))
        if ref is not None and local_id is not None
    ]


def _first_hole(handoff: Handoff, local_groups: LocalGroups, block_size: int) -> int:
    """First logical block that is wanted here and that the owner has no block for; the prompt's end without one."""
    num_blocks = -(-handoff.num_tokens // block_size)
    holes = [
        index
        for refs, local_ids in zip(handoff.groups, local_groups, strict=True)
        for index, (ref, local_id) in enumerate(zip(refs, local_ids, strict=False))
        if ref is None and local_id is not None
    ]
    return min([*holes, num_blocks])


def _offered_and_wanted(handoff: Handoff, wanted: Iterable[_Wanted]) -> BlockGroups:
    places = {(block.group, block.index) for block in wanted}
    groups: list[tuple[BlockRef | None, ...]] = [
        tuple(ref if (group, index) in places else None for index, ref in enumerate(refs))
        for group, refs in enumerate(handoff.groups)
    ]
    return tuple(groups)
