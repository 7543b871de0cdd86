"""Scattered reads between two processes through the NIXL transport, beside memcpy of the same blocks.

    python -m benchmarks.transfer                     blocks of the demo model, KV in bfloat16
    python -m benchmarks.transfer --block-bytes N     other blocks

`measure_scattered_reads` does the same for a caller: agents live in processes of their own, which end by `os._exit`.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass

from benchmarks.baseline import memcpy_blocks, scattered_pairs, touched_arena
from kv_store.transfer.nixl import NixlTransport
from kv_store.transfer.protocol import ByteRange

DEMO_BLOCK_BYTES = 32 * 30 * 2 * 3 * 64 * 2
"""32 tokens x 30 layers x (k, v) x 3 heads x 64 dims x 2 bytes."""
ARENA_BLOCKS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatteredReads:
    """One measurement."""

    block_bytes: int
    num_blocks: int
    connect_s: float
    """First contact, connection included."""
    first_gb_per_s: float
    """The first read, right after connecting."""
    gb_per_s: float
    """Median of the later reads."""
    memcpy_gb_per_s: float


def measure_scattered_reads(
    block_bytes: int = DEMO_BLOCK_BYTES, num_blocks: int = 64, repeats: int = 9
) -> ScatteredReads:
    """Read `num_blocks` scattered blocks from another process, `repeats` times.

    Raises:
        CalledProcessError: The reader or the owner failed; their output says why.
    """
    command = [sys.executable, "-m", "benchmarks.transfer", "reader", str(block_bytes), str(num_blocks), str(repeats)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603  # our own module
    return ScatteredReads(**json.loads(output.splitlines()[-1]))


def _own(block_bytes: int) -> None:
    arena = touched_arena(block_bytes * ARENA_BLOCKS, 7)
    transport = NixlTransport("owner", arena)
    print(transport.metadata().hex(), flush=True)
    sys.stdin.read()


def _read(block_bytes: int, num_blocks: int, repeats: int) -> ScatteredReads:
    command = [sys.executable, "-m", "benchmarks.transfer", "owner", str(block_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:  # noqa: S603  # our own module
        assert owner.stdout is not None
        metadata = bytes.fromhex(owner.stdout.readline())
        try:
            return asyncio.run(_time_reads(metadata, block_bytes, num_blocks, repeats))
        finally:
            owner.kill()


async def _time_reads(metadata: bytes, block_bytes: int, num_blocks: int, repeats: int) -> ScatteredReads:
    arena = touched_arena(block_bytes * ARENA_BLOCKS, 0)
    transport = NixlTransport("reader", arena)
    started_s = time.perf_counter()
    await transport.connect("owner", metadata)
    connect_s = time.perf_counter() - started_s
    rates = []
    written: set[int] = set()
    for repeat in range(repeats):
        pairs = scattered_pairs(num_blocks, ARENA_BLOCKS, seed=repeat)
        written.update(dst for _, dst in pairs)
        ranges = [
            ByteRange(remote_offset=src * block_bytes, local_offset=dst * block_bytes, size=block_bytes)
            for src, dst in pairs
        ]
        started_s = time.perf_counter()
        size_bytes = await transport.read("owner", ranges, deadline_s=30)
        rates.append(size_bytes / (time.perf_counter() - started_s) / 1e9)
    assert int((arena == 7).sum()) == len(written) * block_bytes
    return ScatteredReads(
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        connect_s=connect_s,
        first_gb_per_s=rates[0],
        gb_per_s=statistics.median(rates[1:]),
        memcpy_gb_per_s=memcpy_blocks(block_bytes, num_blocks, ARENA_BLOCKS),
    )


def main() -> None:
    """Run one side, or measure and print."""
    if sys.argv[1:2] == ["owner"]:
        _own(int(sys.argv[2]))
    elif sys.argv[1:2] == ["reader"]:
        print(json.dumps(dataclasses.asdict(_read(*(int(number) for number in sys.argv[2:5])))), flush=True)
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--block-bytes", type=int, default=DEMO_BLOCK_BYTES)
        parser.add_argument("--num-blocks", type=int, default=64)
        options = parser.parse_args()
        print(json.dumps(dataclasses.asdict(measure_scattered_reads(options.block_bytes, options.num_blocks))))


if __name__ == "__main__":
    status = 1
    try:
        main()
        status = 0
    except SystemExit as done:
        status = int(done.code or 0)
    finally:
        if status:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
