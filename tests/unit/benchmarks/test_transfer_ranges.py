"""Measured reads touch the bytes that they say, and no byte twice."""

import random
from collections.abc import Callable
from itertools import chain

import pytest

from benchmarks.transfer_ranges import ARENA_BYTES, contiguous_reads, num_blocks, scattered_reads
from kv_store.transfer.protocol import ByteRange, check_ranges

BLOCK = 737_280
SIZES = [(500_000, 32), (BLOCK, 16), (1_000_000, 16), (256_000_000, 1)]
Maker = Callable[[int, int, int, random.Random], list[list[ByteRange]]]


def dice(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311


@pytest.mark.parametrize(("size", "num_reads"), SIZES)
@pytest.mark.parametrize("make", [contiguous_reads, scattered_reads])
@pytest.mark.parametrize("seed", range(5))
def test_reads_have_the_size_stay_inside_both_buffers_and_do_not_overlap(
    make: Maker, size: int, num_reads: int, seed: int
) -> None:
    arena = num_blocks(BLOCK) * BLOCK

    reads = make(size, BLOCK, num_reads, dice(seed))

    assert [sum(piece.size for piece in read) for read in reads] == [size] * num_reads
    # It refuses what writes a byte twice.
    assert check_ranges(list(chain(*reads)), local_size=arena, remote_size=arena) == size * num_reads
    assert arena >= ARENA_BYTES


def test_a_contiguous_read_is_one_range_and_a_scattered_one_is_blocks_in_no_order() -> None:
    draw = dice(1)

    ((whole,),) = contiguous_reads(10 * BLOCK, BLOCK, 1, draw)
    (pieces,) = scattered_reads(10 * BLOCK, BLOCK, 1, draw)

    assert whole.size == 10 * BLOCK
    assert [piece.size for piece in pieces] == [BLOCK] * 10
    for offsets in ([piece.remote_offset for piece in pieces], [piece.local_offset for piece in pieces]):
        assert offsets != sorted(offsets)
        assert all(offset % BLOCK == 0 for offset in offsets)


def test_the_last_block_of_a_scattered_read_may_be_cut() -> None:
    (pieces,) = scattered_reads(BLOCK + 5, BLOCK, 1, dice(1))

    assert [piece.size for piece in pieces] == [BLOCK, 5]
