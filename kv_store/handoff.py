"""The owner's side of hand-offs: who may read which blocks, until when, and whether what was read is valid.

A one-sided read cannot be refused, so the fence is Close: it answers "valid" only while the hand-off and the
generation that its reader opened still stand. Blocks are given back after Close, Release or the end of the lease.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kv_store.lease import Lease
from messages.errors import HandoffError, HandoffStale, HandoffUnknown, LayoutMismatch
from messages.handoff import BlockId, BlockRef, CloseReply, Handoff, HandoffId, OpenReply
from messages.requests import RequestId

BlockGroups = tuple[tuple[BlockRef | None, ...], ...]
"""Per KV group, per logical block; None is a hole or a block that is not wanted."""


class HandoffOwner(Protocol):
    """The owner, as a reader calls it."""

    async def open(self, handoff: Handoff, groups: BlockGroups) -> OpenReply:
        """Pin `groups` and start a generation.

        Raises:
            HandoffUnknown: The owner holds no such hand-off.
            HandoffStale: Incarnation, block id or key differ.
            LayoutMismatch: The owner lays KV out differently.
            PeerUnreachable: The owner does not answer.
        """
        ...

    async def heartbeat(self, handoff: Handoff, generation: int) -> bool:
        """Extend the lease; False when this generation is over."""
        ...

    async def close(self, handoff: Handoff, generation: int) -> CloseReply:
        """End the read: is everything read under `generation` valid, and which digests do its blocks have."""
        ...

    async def release(self, handoff: Handoff, reason: str) -> None:
        """Tell the owner that nothing (more) is needed; idempotent."""
        ...


@dataclass(slots=True)
class _Entry:
    request_id: RequestId
    groups: BlockGroups
    lease: Lease
    generation: int = 0
    """The last one opened; 0 before the first Open."""
    attempt_id: str = ""
    """The Open that gave the generation."""
    opened: BlockGroups = ()
    superseded: set[str] = field(default_factory=set)
    """Attempts that a later one has replaced."""


class HandoffTable:
    """Every request under a live hand-off is here once; one that left is in `pop_freed` once, then nowhere."""

    def __init__(
        self, *, worker_id: str, incarnation: str, address: str, fingerprint: str, lease_s: float = 30.0
    ) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.lease_s = lease_s
        self._address = address
        self.fingerprint = fingerprint
        self._entries: dict[HandoffId, _Entry] = {}
        self._held: set[RequestId] = set()
        self._generation = 0
        self._fenced: list[RequestId] = []
        self._freed: list[RequestId] = []
        self.num_granted = 0
        """Leases granted, of requests and of lent prefixes."""
        self.num_extended = 0
        """Heartbeats that extended a lease."""
        self.num_late = 0
        """Messages of generations, attempts and hand-offs that were over; each was refused."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def generation(self) -> int:
        """The last generation given out; it rises with every Open and every fence."""
        return self._generation

    def grant(self, request_id: RequestId, groups: BlockGroups, num_tokens: int, now_s: float) -> Handoff:
        """Offer a request's blocks to one reader; they stay referenced until `pop_freed` names the request.

        Raises:
            HandoffError: The request has a hand-off already.
        """
        if request_id in self._held:
            raise HandoffError("the request has a hand-off already", request_id=request_id)
        handoff_id = HandoffId(uuid.uuid4().hex)
        self._held.add(request_id)
        self.num_granted += 1
        self._entries[handoff_id] = _Entry(request_id, groups, Lease.granted(self.lease_s, now_s))
        return Handoff(
            handoff_id=handoff_id,
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            address=self._address,
            fingerprint=self.fingerprint,
            num_tokens=num_tokens,
            groups=groups,
            lease_s=self.lease_s,
        )

    def open(
        self,
        handoff_id: HandoffId,
        *,
        attempt_id: str,
        incarnation: str,
        fingerprint: str,
        groups: BlockGroups,
        now_s: float,
    ) -> int:
        """Pin the wanted blocks under a new generation; one that was open before is superseded.

        The same attempt again gets the generation that it has.

        Args:
            handoff_id: Which hand-off.
            attempt_id: Unique per attempt to read; tells a message that came twice from a second attempt.
            incarnation: Life of this worker that made the hand-off.
            fingerprint: Layout of the reader.
            groups: The blocks to be read, in place; None where none is wanted.
            now_s: This owner's clock.

        Raises:
            HandoffUnknown: Never granted, released, closed or expired.
            HandoffStale: Another incarnation, block id or key, or a later attempt has opened.
            LayoutMismatch: Another layout.
        """
        if incarnation != self.incarnation:
            raise HandoffStale("another life of the owner made this hand-off", handoff_id=handoff_id)
        if fingerprint != self.fingerprint:
            raise LayoutMismatch("the reader lays KV out differently", handoff_id=handoff_id)
        entry = self._live(handoff_id, now_s)
        if entry is None:
            self.num_late += 1
            raise HandoffUnknown("no such hand-off", handoff_id=handoff_id)
        if attempt_id in entry.superseded:
            self.num_late += 1
            raise HandoffStale("a later attempt reads these blocks", handoff_id=handoff_id)
        _check_offered(entry.groups, groups, handoff_id)
        entry.lease = entry.lease.renewed(now_s)
        if entry.generation and entry.attempt_id == attempt_id:
            return entry.generation
        self._generation += 1
        if entry.generation:
            entry.superseded.add(entry.attempt_id)
        entry.generation, entry.attempt_id, entry.opened = self._generation, attempt_id, groups
        return entry.generation

    def heartbeat(self, handoff_id: HandoffId, incarnation: str, generation: int, now_s: float) -> bool:
        """Extend the lease; False when this generation is over."""
        entry = self._opened(handoff_id, incarnation, generation, now_s)
        if entry is None:
            return False
        entry.lease = entry.lease.extended(now_s)
        self.num_extended += 1
        return True

    def opened_blocks(
        self, handoff_id: HandoffId, incarnation: str, generation: int, now_s: float
    ) -> list[tuple[int, BlockId]]:
        """Give group and id of each block that is pinned under `generation`; empty when that is over."""
        entry = self._entries.get(handoff_id)
        is_this_one = incarnation == self.incarnation and entry is not None and generation == entry.generation > 0
        if entry is None or not is_this_one or entry.lease.is_over(now_s):
            return []
        return [(group, ref.block_id) for group, refs in enumerate(entry.opened) for ref in refs if ref is not None]

    def close(self, handoff_id: HandoffId, incarnation: str, generation: int, now_s: float) -> bool:
        """End a read and free its blocks; True when everything read under `generation` is valid."""
        if self._opened(handoff_id, incarnation, generation, now_s) is None:
            return False
        self._free(handoff_id)
        return True

    def release(self, handoff_id: HandoffId, incarnation: str, now_s: float) -> bool:
        """Free a hand-off's blocks at once, in whatever state; False when it was over already."""
        if incarnation != self.incarnation or self._live(handoff_id, now_s) is None:
            self.num_late += 1
            return False
        self._free(handoff_id)
        return True

    def withdraw(self, handoff_id: HandoffId, now_s: float) -> None:
        """Free a hand-off's blocks because its owner needs it no longer; one that was over already stays so."""
        if self._live(handoff_id, now_s) is not None:
            self._free(handoff_id)

    def expire(self, now_s: float) -> list[RequestId]:
        """Fence every hand-off whose lease is over.

        Returns:
            Requests fenced since the last call; `pop_freed` names them too.
        """
        for handoff_id in list(self._entries):
            self._live(handoff_id, now_s)
        fenced, self._fenced = self._fenced, []
        return fenced

    def pop_freed(self) -> list[RequestId]:
        """Requests whose blocks nobody may read any more, each named once."""
        freed, self._freed = self._freed, []
        return freed

    def _opened(self, handoff_id: HandoffId, incarnation: str, generation: int, now_s: float) -> _Entry | None:
        entry = self._live(handoff_id, now_s) if incarnation == self.incarnation else None
        if entry is not None and generation == entry.generation > 0:
            return entry
        self.num_late += 1
        return None

    def _live(self, handoff_id: HandoffId, now_s: float) -> _Entry | None:
        entry = self._entries.get(handoff_id)
        if entry is None or not entry.lease.is_over(now_s):
            return entry
        # Whoever notices first fences: a Close that comes before the sweep is as late as one after it.
        self._generation += 1
        self._fenced.append(entry.request_id)
        self._free(handoff_id)
        return None

    def _free(self, handoff_id: HandoffId) -> None:
        request_id = self._entries.pop(handoff_id).request_id
        self._held.discard(request_id)
        self._freed.append(request_id)


def _check_offered(offered: BlockGroups, wanted: Sequence[Sequence[BlockRef | None]], handoff_id: HandoffId) -> None:
    if len(wanted) != len(offered):
        raise LayoutMismatch("the reader has other KV groups", handoff_id=handoff_id)
    for group, (held, asked) in enumerate(zip(offered, wanted, strict=True)):
        for index, ref in enumerate(asked):
            if ref is not None and (index >= len(held) or held[index] != ref):
                raise HandoffStale("the owner offers another block here", handoff_id=handoff_id, group=group, at=index)
