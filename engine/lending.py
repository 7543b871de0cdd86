"""Blocks that somebody outside the scheduler still reads or may still write, kept referenced by id until it is over."""

from collections.abc import Iterator, Sequence

from engine.events import Lent
from kv_store.block_table import BlockTable
from kv_store.local_cache import LocalCache
from messages.handoff import BlockKey, BlockRef
from messages.requests import RequestId


class Lending:
    """Every id here holds one table; ending it gives the blocks back, and a second end does nothing."""

    def __init__(self, cache: LocalCache, block_size: int) -> None:
        self._cache = cache
        self._block_size = block_size
        self._tables: dict[RequestId, BlockTable] = {}

    def __len__(self) -> int:
        return len(self._tables)

    def __iter__(self) -> Iterator[RequestId]:
        return iter(self._tables)

    def lend(self, lend_id: RequestId, keys: Sequence[BlockKey], first_block: int) -> Lent:
        """Reference the longest prefix of `keys` that is a hit in all groups now; nothing is computed for it.

        Args:
            lend_id: Not in use.
            keys: Of a prompt's leading full blocks.
            first_block: The reader has what comes before; without more than that, nothing is lent.
        """
        num_tokens = self._cache.match(keys, len(keys) * self._block_size + 1)
        if num_tokens <= first_block * self._block_size:
            return Lent(request_id=lend_id, num_tokens=0, groups=())
        table = self._cache.open_table(keys, num_tokens)
        self._tables[lend_id] = table
        groups = tuple(
            tuple(
                None if block_id is None or i < first_block else BlockRef(block_id=block_id, key=keys[i])
                for i, block_id in enumerate(group)
            )
            for group in self._cache.block_ids(table)
        )
        return Lent(request_id=lend_id, num_tokens=num_tokens, groups=groups)

    def set_aside(self, aside_id: RequestId, table: BlockTable) -> None:
        """Keep a table whose blocks a failed read may still write."""
        self._tables[aside_id] = table

    def end(self, lend_id: RequestId) -> bool:
        """Give the blocks of `lend_id` back; False when there are none."""
        table = self._tables.pop(lend_id, None)
        if table is None:
            return False
        self._cache.drop(table)
        return True
