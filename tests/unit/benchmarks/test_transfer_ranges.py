import random
from collections.abc import Callable

import pytest

from benchmarks.transfer_ranges import ARENA_BYTES, contiguous_range, num_blocks, scattered_ranges
from kv_store.transfer.protocol import ByteRange, check_ranges

BLOCK = 737_280
SIZES = [500_000, BLOCK, 1_000_000, 256_000_000]
Maker = Callable[[int, int, random.Random], list[ByteRange]]


def dice(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("make", [contiguous_range, scattered_ranges])
def test_ranges_have_the_size_and_stay_inside_both_buffers(make: Maker, size: int) -> None:
    arena = num_blocks(BLOCK) * BLOCK

    totals = [check_ranges(make(size, BLOCK, dice(seed)), local_size=arena, remote_size=arena) for seed in (1, 2)]

    assert totals == [size, size]
    assert arena >= ARENA_BYTES


def test_a_contiguous_read_is_one_range_and_a_scattered_one_is_blocks_in_no_order() -> None:
    draw = dice(1)

    (whole,) = contiguous_range(10 * BLOCK, BLOCK, draw)
    pieces = scattered_ranges(10 * BLOCK, BLOCK, draw)

    assert whole.size == 10 * BLOCK
    assert [piece.size for piece in pieces] == [BLOCK] * 10
    for offsets in ([piece.remote_offset for piece in pieces], [piece.local_offset for piece in pieces]):
        assert offsets != sorted(offsets)
        assert all(offset % BLOCK == 0 for offset in offsets)


def test_the_last_block_of_a_scattered_read_may_be_cut() -> None:
    pieces = scattered_ranges(BLOCK + 5, BLOCK, dice(1))

    assert [piece.size for piece in pieces] == [BLOCK, 5]
