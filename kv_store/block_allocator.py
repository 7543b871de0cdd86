"""The physical blocks of one KV group: reference counts, and which cached block to lose first.

    free        no reference, no key     the next to be handed out
    cached      no reference, a key      handed out when nothing is free: leaves first, least recently used first
    referenced  at least one reference   never handed out

A block whose key has successors in the index outlives them: without it they match no prefix.
"""

import heapq
from collections.abc import Iterable, Sequence

from kv_store.prefix_index import PrefixIndex
from messages.errors import OutOfBlocks
from messages.handoff import BlockId, BlockKey

_MIN_STALE = 64


class BlockAllocator:
    """One group's block ids. Every id is free, or cached, or has a positive count, and exactly one of them."""

    def __init__(self, num_blocks: int, index: PrefixIndex | None = None) -> None:
        self.index = index if index is not None else PrefixIndex(block_size=1)
        self._counts = [0] * num_blocks
        # A stack; its top end is the lowest id, so that fresh tables get neighbours, which move as one range.
        self._free = [BlockId(i) for i in reversed(range(num_blocks))]
        # Cached blocks with the time of their last use; the dict's order is the order of those times.
        self._cached: dict[BlockId, int] = {}
        # (last use, block) of leaves; entries go stale and are checked when popped.
        self._leaves: list[tuple[int, BlockId]] = []
        self._clock = 0

    @property
    def num_blocks(self) -> int:
        """All blocks of the group."""
        return len(self._counts)

    @property
    def num_free(self) -> int:
        """Blocks without reference and key."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks without reference that can still be hit."""
        return len(self._cached)

    @property
    def num_referenced(self) -> int:
        """Blocks with at least one reference."""
        return len(self._counts) - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give at most."""
        return len(self._free) + len(self._cached)

    def num_references(self, block_id: BlockId) -> int:
        """References on one block."""
        return self._counts[block_id]

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Take `num_blocks` blocks, all or none, each with one reference and no key.

        Raises:
            OutOfBlocks: Fewer are free or cached; nothing was taken and nothing evicted.
        """
        if num_blocks > self.num_available:
            raise OutOfBlocks("no free KV blocks", wanted=num_blocks, available=self.num_available)
        while len(self._free) < num_blocks:
            self._evict()
        taken = [self._free.pop() for _ in range(num_blocks)]
        for block_id in taken:
            self._counts[block_id] = 1
        return taken

    def acquire(self, block_ids: Iterable[BlockId]) -> None:
        """Add a reference to blocks that are cached or referenced.

        Raises:
            KeyError: A block is free.
        """
        for block_id in block_ids:
            if not self._counts[block_id]:
                del self._cached[block_id]
            self._counts[block_id] += 1

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Give one reference back on each block, in the order of a table; the last becomes the least recently used.

        Raises:
            ValueError: A block has no reference to give back.
        """
        for block_id in reversed(block_ids):
            if not self._counts[block_id]:
                raise ValueError(f"block {block_id} is released more often than acquired")
            self._counts[block_id] -= 1
            if self._counts[block_id]:
                continue
            if block_id in self.index:
                self._clock += 1
                self._cached[block_id] = self._clock
                self._offer(block_id)
            else:
                self._free.append(block_id)

    def unindex(self, block_id: BlockId) -> None:
        """Take a block's key away and those of all blocks that follow it; what nobody references becomes free."""
        if block_id not in self.index:
            return
        parent = self.index.parent_of(block_id)
        for removed in self.index.remove(block_id):
            if self._cached.pop(removed, None) is not None:
                self._free.append(removed)
        if parent is not None:
            self._offer(parent)

    def keep(self, block_id: BlockId, key: BlockKey, parent: BlockKey | None) -> bool:
        """Give a referenced full block a key, as `PrefixIndex.add` does.

        Raises:
            ValueError: Nobody references the block, or it has a key.
        """
        if not self._counts[block_id]:
            raise ValueError(f"block {block_id} is not in use")
        return self.index.add(block_id, key, parent)

    def clear(self) -> None:
        """Make every cached block free."""
        for block_id in list(self._cached):
            self.unindex(block_id)

    def _evict(self) -> None:
        while self._leaves:
            last_use, block_id = heapq.heappop(self._leaves)
            if self._cached.get(block_id) == last_use and self.index.is_leaf(block_id):
                self.unindex(block_id)
                return
        # Each cached block is followed by one in use, of a request that computed the shared part itself.
        # Those lose their keys, which match nothing without this one, and stay where they are.
        self.unindex(next(iter(self._cached)))

    def _offer(self, block_id: BlockId) -> None:
        last_use = self._cached.get(block_id)
        if last_use is None or not self.index.is_leaf(block_id):
            return
        heapq.heappush(self._leaves, (last_use, block_id))
        if len(self._leaves) > 2 * len(self._cached) + _MIN_STALE:
            self._leaves = [(used, block) for block, used in self._cached.items() if self.index.is_leaf(block)]
            heapq.heapify(self._leaves)
