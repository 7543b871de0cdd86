"""Where the bytes of a measured read lie on both sides: in one run, or in blocks in no order."""

import random

from kv_store.transfer.protocol import ByteRange

ARENA_BYTES = 400_000_000
"""At least, of each buffer: more than a processor's cache, and than the largest read."""


def num_blocks(block_bytes: int) -> int:
    """Blocks of each buffer."""
    return -(-ARENA_BYTES // block_bytes)


def contiguous_range(size: int, block_bytes: int, draw: random.Random) -> list[ByteRange]:
    """Make one run of `size` bytes that starts at any block on either side."""
    last_start = num_blocks(block_bytes) - -(-size // block_bytes)
    remote, local = (draw.randint(0, last_start) * block_bytes for _ in range(2))
    return [ByteRange(remote_offset=remote, local_offset=local, size=size)]


def scattered_ranges(size: int, block_bytes: int, draw: random.Random) -> list[ByteRange]:
    """Make `size` bytes of blocks, on both sides without repetition and in no order; the last one may be cut."""
    count = -(-size // block_bytes)
    remote, local = (draw.sample(range(num_blocks(block_bytes)), count) for _ in range(2))
    return [
        ByteRange(
            remote_offset=src * block_bytes,
            local_offset=dst * block_bytes,
            size=min(block_bytes, size - nth * block_bytes),
        )
        for nth, (src, dst) in enumerate(zip(remote, local, strict=True))
    ]
