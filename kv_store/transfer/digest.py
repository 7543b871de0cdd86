"""A short digest of a block's bytes as they lie in the arena: what was sent and what arrived can be compared.

Source: XXH3, Yann Collet, 2019.
"""

from collections.abc import Sequence

import torch
import xxhash

from messages.handoff import BlockId


class BlockDigester:
    """Digests blocks of one arena; may be called from any thread, the blocks must not change meanwhile.

    Args:
        buffer: The arena, 1-D uint8.
        group_offsets: Bytes from its start to block 0 of each KV group.
        block_bytes: Size of one block of each KV group.
    """

    def __init__(self, buffer: torch.Tensor, group_offsets: Sequence[int], block_bytes: Sequence[int]) -> None:
        self._buffer = buffer
        self._group_offsets = tuple(group_offsets)
        self._block_bytes = tuple(block_bytes)

    def digest(self, group: int, block_id: BlockId) -> int:
        """XXH3 of the bytes of one block, 64 bits."""
        size = self._block_bytes[group]
        start = self._group_offsets[group] + block_id * size
        return xxhash.xxh3_64_intdigest(self._buffer[start : start + size].cpu().numpy().data)
