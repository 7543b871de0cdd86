"""One worker's KV blocks as the scheduler sees them: hits, room, and giving back, over all KV groups at once.

Single-threaded. A full block is immutable from the moment it may be hit: whoever wants other tokens in its place
takes another block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_store.block_allocator import BlockAllocator
from kv_store.block_table import BlockIds, BlockTable
from kv_store.layout import BlockLayout
from kv_store.prefix_index import CacheChanges, KeyCensus, PrefixIndex
from messages.errors import OutOfBlocks
from messages.handoff import BlockId, BlockKey

__all__ = ["BlockCopy", "CacheChanges", "GroupCounts", "LocalCache"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCounts:
    """Where one group's blocks are; free + cached + referenced == total. Baseline is referenced == 0."""

    name: str
    total: int
    free: int
    cached: int
    """Unreferenced, can be hit, can be taken."""
    referenced: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """The bytes of one block to be copied into another, before anybody writes into either."""

    group: int
    source: BlockId
    target: BlockId


class LocalCache:
    """Block tables over one allocator and one prefix index per group; a table's blocks are referenced by it alone."""

    def __init__(self, layout: BlockLayout, num_blocks: tuple[int, ...]) -> None:
        self._layout = layout
        self._size = layout.block_size
        self._census = KeyCensus(len(layout.groups))
        self._windows = [group.window for group in layout.groups]
        self._groups = [
            BlockAllocator(count, PrefixIndex(block_size=self._size, window=window, census=self._census))
            for count, window in zip(num_blocks, self._windows, strict=True)
        ]
        self._full_indexes = [group.index for group in self._groups if not group.index.has_window]
        self._window_indexes = [group.index for group in self._groups if group.index.has_window]

    @property
    def has_windows(self) -> bool:
        """Whether a group sees only its last tokens, so that a shorter prefix needs other blocks."""
        return bool(self._window_indexes)

    def match(self, keys: Sequence[BlockKey], num_tokens: int) -> int:
        """Give the number of leading tokens whose KV is at hand in all groups. No side effects.

        Args:
            keys: Of the prompt's full blocks.
            num_tokens: Length of the prompt, >= 1.

        Returns:
            A multiple of the block size, at most `num_tokens - 1`, because the last token is always computed.
        """
        length = max(0, num_tokens - 1) // self._size
        for index in self._full_indexes:
            length = index.match(keys, length)
        # A shorter hit needs other blocks of a window group, so ask until none of them shortens it.
        before = None
        while length != before:
            before = length
            for index in self._window_indexes:
                length = index.match(keys, length)
        return length * self._size

    def open_table(self, keys: Sequence[BlockKey], num_cached: int) -> BlockTable:
        """Make a table whose first `num_cached` tokens are a hit, and reference the blocks of the hit.

        Args:
            keys: As given to `match`.
            num_cached: What `match` said, or less in a model without windows; 0 makes an empty table.

        Raises:
            LookupError: A block of the hit is gone since `match`, or `num_cached` is not a number of whole blocks;
                nothing was referenced.
        """
        num_blocks, rest = divmod(num_cached, self._size)
        if rest or num_blocks > len(keys):
            raise LookupError(f"{num_cached} tokens are not a number of whole blocks with keys")
        places = [_hit(group.index, keys, num_blocks) for group in self._groups]
        table = BlockTable(num_groups=len(self._groups), block_size=self._size)
        for number, group in enumerate(self._groups):
            table.append(number, places[number])
            group.acquire(table.held(number))
        table.set_valid(num_cached)
        table.num_indexed = num_blocks
        return table

    def extend(self, table: BlockTable, num_tokens: int, *, num_computed: int = 0) -> None:
        """Give a table room for `num_tokens` tokens in every group, all or none.

        Args:
            table: Any table of this cache.
            num_tokens: Total, not additional; room that the table has already is kept.
            num_computed: New places that no token from this position on can see become holes in window groups.

        Raises:
            OutOfBlocks: A group has too few blocks; the table and the cache are as before.
        """
        wanted = -(-num_tokens // self._size)
        holes = [0] * len(self._groups)
        fresh = [0] * len(self._groups)
        for number, group in enumerate(self._groups):
            missing = max(0, wanted - table.num_blocks(number))
            unseen = self._num_unseen(number, num_computed) - table.num_blocks(number)
            holes[number] = min(max(0, unseen), missing)
            fresh[number] = missing - holes[number]
            if fresh[number] > group.num_available:
                name, free = self._layout.groups[number].name, group.num_available
                raise OutOfBlocks("no free KV blocks", group=name, wanted=fresh[number], available=free)
        for number, group in enumerate(self._groups):
            if holes[number] or fresh[number]:
                table.append(number, [None] * holes[number])
                table.append(number, group.allocate(fresh[number]))

    def mark_valid(self, table: BlockTable, num_tokens: int, keys: Sequence[BlockKey]) -> None:
        """State that tokens [0, num_tokens) hold KV now, and index the blocks that became full.

        A block whose key another block has already stays private to the table. Costs only what is new.

        Args:
            table: Any table of this cache.
            num_tokens: Total, not additional.
            keys: `keys[i]` belongs to logical block i; a block without a key yet is indexed by a later call.

        Raises:
            ValueError: The table has no room for so many tokens, or holds more already.
        """
        if num_tokens < table.num_valid:
            raise ValueError(f"{table.num_valid} tokens hold KV already; truncate or forget to go back")
        table.set_valid(num_tokens)
        for i in range(table.num_indexed, min(num_tokens // self._size, len(keys))):
            self._index_block(table, i, keys)
            table.num_indexed = i + 1

    def slide(self, table: BlockTable, num_computed: int) -> None:
        """Give back the blocks that lie wholly before `num_computed - window`, in window groups.

        Blocks that are indexed stay cached, so call it after `mark_valid`. Costs only what it frees.
        """
        for number, window in enumerate(self._windows):
            if window is not None and num_computed > window:
                self._groups[number].release(table.free_before(number, num_computed - window))

    def fork(self, table: BlockTable, num_tokens: int) -> tuple[BlockTable, list[BlockCopy]]:
        """Make a table that shares the full blocks of the first `num_tokens` tokens of another.

        A block that the cut goes through gets a copy of its own, because both tables will write into it.

        Raises:
            OutOfBlocks: There is no block for the copy; nothing was taken.
        """
        full, rest = divmod(num_tokens, self._size)
        if rest and any(group.num_available < 1 for group in self._groups):
            raise OutOfBlocks("no free KV block for a copy")
        fork = BlockTable(num_groups=len(self._groups), block_size=self._size)
        copies: list[BlockCopy] = []
        for number, group in enumerate(self._groups):
            fork.append(number, self.block_ids(table)[number][:full])
            group.acquire(fork.held(number))
            source = table.block_at(number, full) if rest else None
            if source is not None:
                (target,) = group.allocate(1)
                fork.append(number, [target])
                copies.append(BlockCopy(group=number, source=source, target=target))
        fork.set_valid(num_tokens)
        fork.num_indexed = min(full, table.num_indexed)
        return fork, copies

    def truncate(self, table: BlockTable, num_tokens: int) -> int:
        """Cut a table back to its first `num_tokens` tokens.

        A full block may be shared or hit, so one that the cut goes through is given back whole. Where a window slid
        past what a query at the cut needs, the whole table is given back.

        Returns:
            Leading tokens that still hold KV, <= num_tokens; compute goes on from there.
        """
        if num_tokens < table.num_valid // self._size * self._size:
            num_tokens = num_tokens // self._size * self._size
        if not self._can_resume(table, min(num_tokens, table.num_valid)):
            num_tokens = 0
        for group, dropped in zip(self._groups, table.truncate(num_tokens), strict=True):
            group.release(dropped)
        return table.num_valid

    def forget(self, table: BlockTable, from_token: int) -> None:
        """State that the KV from the block of token `from_token` on is bad: it is valid no more and cannot be hit.

        What follows the bad blocks in the prefix index is forgotten too. The table keeps its blocks, for a late
        write may still reach them; before computing again, `truncate` it to its `num_valid`: the last whole block's
        end, or 0 where a window slid past what a query there needs.
        """
        for number, group in enumerate(self._groups):
            for block_id in table.held(number, from_token // self._size):
                group.unindex(block_id)
        num_valid = min(table.num_valid, from_token // self._size * self._size)
        table.set_valid(num_valid if self._can_resume(table, num_valid) else 0)

    def drop(self, table: BlockTable) -> None:
        """Give back every reference of a table, which is empty afterwards; a second call does nothing."""
        for group, dropped in zip(self._groups, table.truncate(0), strict=True):
            group.release(dropped)

    def block_ids(self, table: BlockTable) -> tuple[BlockIds, ...]:
        """Give the ids per group and logical block; the same object until the table changes."""
        return table.all_block_ids()

    def take_changes(self) -> CacheChanges:
        """Report which keys became complete over all groups and which no longer are, since the last call."""
        return self._census.take()

    def counts(self) -> tuple[GroupCounts, ...]:
        """Count the blocks of every group."""
        return tuple(
            GroupCounts(
                name=shape.name,
                total=group.num_blocks,
                free=group.num_free,
                cached=group.num_cached,
                referenced=group.num_referenced,
            )
            for shape, group in zip(self._layout.groups, self._groups, strict=True)
        )

    def clear(self) -> None:
        """Forget every block that no table references."""
        for group in self._groups:
            group.clear()

    def _index_block(self, table: BlockTable, i: int, keys: Sequence[BlockKey]) -> None:
        parent = keys[i - 1] if i else None
        for number, group in enumerate(self._groups):
            block_id = table.block_at(number, i)
            if block_id is not None:
                group.keep(block_id, keys[i], parent)

    def _can_resume(self, table: BlockTable, position: int) -> bool:
        starts = [0 if window is None else max(0, position - window) for window in self._windows]
        return all(table.is_whole(number, range(start, position)) for number, start in enumerate(starts))

    def _num_unseen(self, number: int, num_computed: int) -> int:
        window = self._windows[number]
        return 0 if window is None else max(0, num_computed - window) // self._size


def _hit(index: PrefixIndex, keys: Sequence[BlockKey], num_blocks: int) -> list[BlockId | None]:
    first = index.first_needed(num_blocks)
    found = [index.block_of(key) for key in keys[first:num_blocks]]
    if None in found:
        raise LookupError("a block of the hit is gone; match again")
    return [None] * first + found
