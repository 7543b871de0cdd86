"""What every measured number is compared with."""

import random
import statistics
import time

import torch

from kv_store.huge_pages import advise_huge_pages


def scattered_pairs(num_blocks: int, arena_blocks: int, seed: int = 1) -> list[tuple[int, int]]:
    """(source block, destination block), both without repetition and in no order."""
    rng = random.Random(seed)  # noqa: S311  # a shuffle, not a secret
    sources, destinations = (rng.sample(range(arena_blocks), num_blocks) for _ in range(2))
    return list(zip(sources, destinations, strict=True))


def touched_arena(size_bytes: int, value: int) -> torch.Tensor:
    """A host buffer whose pages exist, huge where the kernel allows it; 1-D uint8."""
    arena = torch.empty(size_bytes, dtype=torch.uint8)
    advise_huge_pages(arena.data_ptr(), arena.numel())
    return arena.fill_(value)


def memcpy_blocks(block_bytes: int, num_blocks: int, arena_blocks: int = 256, repeats: int = 5) -> float:
    """Copy scattered blocks between two touched arenas of one process with one thread.

    The upper bound of a transfer between processes of one machine. Each repeat copies other blocks, so that few small
    ones are not measured out of the processor's cache.

    Args:
        block_bytes: Size of a block.
        num_blocks: Blocks per copy.
        arena_blocks: Blocks that each arena has room for; raised to `num_blocks`.
        repeats: Copies to take the median of.

    Returns:
        Median over `repeats`, GB/s (10^9 bytes copied per second).
    """
    arena_blocks = max(arena_blocks, num_blocks)
    source, destination = (touched_arena(block_bytes * arena_blocks, value) for value in (1, 2))
    # numpy copies in the caller's thread, whatever torch's thread count is.
    from_rows, to_rows = (arena.numpy().reshape(arena_blocks, block_bytes) for arena in (source, destination))
    durations_s = []
    for repeat in range(repeats):
        pairs = scattered_pairs(num_blocks, arena_blocks, seed=repeat)
        started_s = time.perf_counter()
        for src, dst in pairs:
            to_rows[dst] = from_rows[src]
        durations_s.append(time.perf_counter() - started_s)
    return num_blocks * block_bytes / statistics.median(durations_s) / 1e9
