"""Which block of one KV group holds which key, and how long a prefix is at hand.

In a group that sees everything a key is of use only after its predecessors, so entries form a forest and an entry
leaves only after its children. In a sliding-window group each entry stands alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from messages.handoff import BlockId, BlockKey


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheChanges:
    """What the registry must hear: keys that every group holds now, and keys that no longer are."""

    stored: list[BlockKey]
    removed: list[BlockKey]


class KeyCensus:
    """In how many groups each key is. A key counts as stored while all groups hold it.

    Only net changes are reported: what came and went between two calls of `take` never shows.
    """

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._num_holding: dict[BlockKey, int] = {}
        self._stored: dict[BlockKey, None] = {}
        self._removed: dict[BlockKey, None] = {}

    def add(self, key: BlockKey) -> None:
        """Count one more group that holds `key`."""
        held = self._num_holding.get(key, 0) + 1
        self._num_holding[key] = held
        if held == self._num_groups:
            _cancel_or_note(key, noted=self._stored, opposite=self._removed)

    def discard(self, key: BlockKey) -> None:
        """Count one group fewer that holds `key`."""
        held = self._num_holding.pop(key)
        if held > 1:
            self._num_holding[key] = held - 1
        if held == self._num_groups:
            _cancel_or_note(key, noted=self._removed, opposite=self._stored)

    def take(self) -> CacheChanges:
        """Report the net changes since the last call, in the order in which they happened."""
        changes = CacheChanges(stored=list(self._stored), removed=list(self._removed))
        self._stored.clear()
        self._removed.clear()
        return changes


@dataclass(slots=True, kw_only=True)
class _Entry:
    key: BlockKey
    block_id: BlockId
    parent: "_Entry | None"
    children: dict[BlockKey, "_Entry"] = field(default_factory=dict)


class PrefixIndex:
    """The full blocks of one group by key. Every entry's parent is an entry too; a block has at most one key."""

    def __init__(self, *, block_size: int, window: int | None = None, census: KeyCensus | None = None) -> None:
        self._block_size = block_size
        self._window = window
        self._census = census if census is not None else KeyCensus(1)
        self._by_key: dict[BlockKey, _Entry] = {}
        self._by_block: dict[BlockId, _Entry] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, block_id: BlockId) -> bool:
        return block_id in self._by_block

    @property
    def has_window(self) -> bool:
        """Whether the group sees only its last tokens."""
        return self._window is not None

    def block_of(self, key: BlockKey) -> BlockId | None:
        """Give the block that holds `key`, or None."""
        entry = self._by_key.get(key)
        return None if entry is None else entry.block_id

    def is_leaf(self, block_id: BlockId) -> bool:
        """Tell whether a block is indexed and none of the indexed blocks follows it."""
        entry = self._by_block.get(block_id)
        return entry is not None and not entry.children

    def parent_of(self, block_id: BlockId) -> BlockId | None:
        """Give the indexed block that an indexed block follows; None at a root and in a window group."""
        parent = self._by_block[block_id].parent
        return None if parent is None else parent.block_id

    def first_needed(self, num_blocks: int) -> int:
        """Give the first logical block that a hit of `num_blocks` blocks needs."""
        if self._window is None:
            return 0
        return max(0, num_blocks * self._block_size - self._window) // self._block_size

    def match(self, keys: Sequence[BlockKey], max_blocks: int) -> int:
        """Give the longest hit of at most `max_blocks` blocks, in blocks. No side effects."""
        if self._window is None:
            limit = min(max_blocks, len(keys))
            return next((i for i in range(limit) if keys[i] not in self._by_key), limit)
        length = min(max_blocks, len(keys))
        while length:
            needed = range(length - 1, self.first_needed(length) - 1, -1)
            missing = next((i for i in needed if keys[i] not in self._by_key), None)
            if missing is None:
                return length
            # Every hit that ends behind the missing block needs it too, so none of them is possible.
            length = missing
        return 0

    def add(self, block_id: BlockId, key: BlockKey, parent: BlockKey | None) -> bool:
        """Index a full block, unless its key has a block already or its predecessor is not indexed.

        Args:
            block_id: A block without a key.
            key: What it holds.
            parent: The key before it; None for a prompt's first block.

        Returns:
            Whether the block is indexed now.

        Raises:
            ValueError: The block has a key already.
        """
        if block_id in self._by_block:
            raise ValueError(f"block {block_id} has a key already")
        if key in self._by_key:
            return False
        above = None
        if parent is not None and self._window is None:
            above = self._by_key.get(parent)
            if above is None:
                return False
        entry = _Entry(key=key, block_id=block_id, parent=above)
        if above is not None:
            above.children[key] = entry
        self._by_key[key] = self._by_block[block_id] = entry
        self._census.add(key)
        return True

    def remove(self, block_id: BlockId) -> list[BlockId]:
        """Un-index a block and all that follow it.

        Returns:
            The blocks that have no key any more, each before the one that it follows.
        """
        order = [self._by_block[block_id]]
        for entry in order:
            order.extend(entry.children.values())
        order.reverse()
        for entry in order:
            self._detach(entry)
        return [entry.block_id for entry in order]

    def _detach(self, entry: _Entry) -> None:
        if entry.parent is not None:
            del entry.parent.children[entry.key]
        del self._by_key[entry.key], self._by_block[entry.block_id]
        self._census.discard(entry.key)


def _cancel_or_note(key: BlockKey, *, noted: dict[BlockKey, None], opposite: dict[BlockKey, None]) -> None:
    if key in opposite:
        del opposite[key]
    else:
        noted[key] = None
