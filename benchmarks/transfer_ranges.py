"""Where the bytes of measured reads lie on both sides: each in one run, or in blocks in no order; none overlap."""

import random
from collections.abc import Sequence

from kv_store.transfer.protocol import ByteRange

ARENA_BYTES = 400_000_000
"""At least, of each buffer: more than a processor's cache, and than the largest read."""


def num_blocks(block_bytes: int) -> int:
    """Blocks of each buffer."""
    return -(-ARENA_BYTES // block_bytes)


def contiguous_reads(size: int, block_bytes: int, num_reads: int, draw: random.Random) -> list[list[ByteRange]]:
    """Make reads of one run of `size` bytes, each at any place that begins with a block on either side."""
    span = -(-size // block_bytes)
    remote, local = (_spread(span, num_blocks(block_bytes), num_reads, draw) for _ in range(2))
    return [
        [ByteRange(remote_offset=src * block_bytes, local_offset=dst * block_bytes, size=size)]
        for src, dst in zip(remote, local, strict=True)
    ]


def scattered_reads(size: int, block_bytes: int, num_reads: int, draw: random.Random) -> list[list[ByteRange]]:
    """Make reads of `size` bytes of blocks, on both sides without repetition and in no order; each last one is cut."""
    count = -(-size // block_bytes)
    remote, local = (draw.sample(range(num_blocks(block_bytes)), count * num_reads) for _ in range(2))
    return [
        _blocks(size, block_bytes, remote[first : first + count], local[first : first + count])
        for first in range(0, count * num_reads, count)
    ]


def _spread(span: int, total: int, count: int, draw: random.Random) -> list[int]:
    """First blocks of `count` runs of `span` blocks that do not overlap, in no order."""
    places = total // span
    shift = draw.randint(0, total - places * span)
    return [shift + place * span for place in draw.sample(range(places), count)]


def _blocks(size: int, block_bytes: int, remote: Sequence[int], local: Sequence[int]) -> list[ByteRange]:
    return [
        ByteRange(
            remote_offset=src * block_bytes,
            local_offset=dst * block_bytes,
            size=min(block_bytes, size - nth * block_bytes),
        )
        for nth, (src, dst) in enumerate(zip(remote, local, strict=True))
    ]
