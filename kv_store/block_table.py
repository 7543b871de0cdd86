"""One request's blocks in every KV group, by logical block: block i covers tokens [i * size, (i + 1) * size).

A place may be a hole: a sliding window has passed it, or a hit did not need it. The table counts no references;
whoever changes it gives back the ids that its methods return.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from messages.handoff import BlockId

BlockIds = tuple[BlockId | None, ...]
"""One group's blocks by logical block; None is a hole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEntry:
    """One place of a table."""

    block_id: BlockId | None
    """None is a hole."""
    first_position: int
    """Position of the token whose KV comes first in the block."""
    num_valid: int
    """Leading tokens of the block that hold KV; 0 in a hole."""


class BlockTable:
    """Blocks per group; tokens [0, num_valid) hold KV except in holes, and num_valid <= capacity of every group."""

    __slots__ = ("_all_ids", "_first_held", "_groups", "block_size", "num_indexed", "num_valid")

    def __init__(self, *, num_groups: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_valid = 0
        """Leading tokens that hold KV."""
        self.num_indexed = 0
        """Leading blocks that the prefix index has been offered."""
        self._groups: list[list[BlockId | None]] = [[] for _ in range(num_groups)]
        # Everything before it is a hole already, so that sliding costs only what it frees.
        self._first_held = [0] * num_groups
        self._all_ids: tuple[BlockIds, ...] | None = None

    @property
    def capacity(self) -> int:
        """Tokens that the blocks and holes of every group cover."""
        return min(map(len, self._groups)) * self.block_size

    def num_blocks(self, group: int) -> int:
        """Places of a group, holes among them."""
        return len(self._groups[group])

    def block_ids(self, group: int) -> BlockIds:
        """Give one group's ids by logical block; the tuple is kept until the table changes."""
        return self.all_block_ids()[group]

    def all_block_ids(self) -> tuple[BlockIds, ...]:
        """Give every group's ids; the tuples are kept until the table changes, so asking again costs nothing."""
        if self._all_ids is None:
            self._all_ids = tuple(map(tuple, self._groups))
        return self._all_ids

    def block_at(self, group: int, index: int) -> BlockId | None:
        """Give the id of logical block `index`; None is a hole."""
        return self._groups[group][index]

    def entries(self, group: int) -> list[BlockEntry]:
        """Describe every place of a group."""
        return [self._entry(i * self.block_size, block_id) for i, block_id in enumerate(self._groups[group])]

    def is_whole(self, group: int, positions: range) -> bool:
        """Tell whether no hole and no missing place covers a position of the range."""
        blocks = range(positions.start // self.block_size, -(-positions.stop // self.block_size))
        places = self._groups[group]
        return blocks.stop <= len(places) and all(places[i] is not None for i in blocks)

    def held(self, group: int, first_block: int = 0) -> list[BlockId]:
        """Give the ids of a group from logical block `first_block` on, without holes."""
        start = max(first_block, self._first_held[group])
        return [block_id for block_id in self._groups[group][start:] if block_id is not None]

    def append(self, group: int, block_ids: Iterable[BlockId | None]) -> None:
        """Add places at the end of a group."""
        self._groups[group].extend(block_ids)
        self._all_ids = None

    def set_valid(self, num_tokens: int) -> None:
        """State that tokens [0, num_tokens), and no others, hold KV.

        Raises:
            ValueError: The blocks do not cover so many tokens.
        """
        if not 0 <= num_tokens <= self.capacity:
            raise ValueError(f"{num_tokens} tokens do not fit the table's {self.capacity}")
        self.num_valid = num_tokens
        self.num_indexed = min(self.num_indexed, num_tokens // self.block_size)

    def truncate(self, num_tokens: int) -> list[list[BlockId]]:
        """Cut the table behind token `num_tokens`; a block that it cuts through stays.

        Returns:
            Per group the ids that are no longer in the table, in order.
        """
        keep = -(-num_tokens // self.block_size)
        dropped = [self.held(group, keep) for group in range(len(self._groups))]
        for group, places in enumerate(self._groups):
            del places[keep:]
            self._first_held[group] = min(self._first_held[group], keep)
        self.num_valid = min(self.num_valid, num_tokens)
        self.num_indexed = min(self.num_indexed, num_tokens // self.block_size)
        self._all_ids = None
        return dropped

    def free_before(self, group: int, position: int) -> list[BlockId]:
        """Turn the blocks of a group that end at or before `position` into holes.

        Returns:
            The ids that are no longer in the table, in order.
        """
        places, start = self._groups[group], self._first_held[group]
        stop = min(position // self.block_size, len(places))
        if stop <= start:
            return []
        freed = [block_id for block_id in places[start:stop] if block_id is not None]
        places[start:stop] = [None] * (stop - start)
        self._first_held[group] = stop
        self._all_ids = None
        return freed

    def _entry(self, first: int, block_id: BlockId | None) -> BlockEntry:
        num_valid = 0 if block_id is None else min(max(self.num_valid - first, 0), self.block_size)
        return BlockEntry(block_id=block_id, first_position=first, num_valid=num_valid)
