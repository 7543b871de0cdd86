"""Reads between two processes of one machine, beside memcpy of the same blocks in one process.

    python benchmarks/transfer.py [--json] [--quick] [--block-bytes N] [--network]

A size is read as one contiguous run and as scattered blocks in no order, the last of them shorter; blocks are those of
the demo model, 32 tokens of bfloat16. Small reads come as in a busy worker, several in flight, until 16 MB have moved;
a large one is alone. One thread copies as many scattered blocks of the same sizes between two buffers as large as the
arenas. The three alternate, each time with other blocks, and medians are shown: `gb_s` is the contiguous read (10^9
bytes per second), `memcpy_ratio` that over memcpy, `scattered_ratio` the scattered read over the contiguous one, and
`alone_us` how long one contiguous read takes when no other is in flight. Memory is shared, as between workers of one
machine; with --network NIXL reads it as that of another machine.
"""

import sys
from pathlib import Path

# As a script: engine.py beside this file must not hide the package `engine`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.baseline import copy_ranges, touched_arena
from benchmarks.transfer_ranges import contiguous_reads, num_blocks, scattered_reads
from kv_store.transfer.nixl import NixlTransport
from kv_store.transfer.protocol import BlockTransport, ByteRange
from kv_store.transfer.same_host import SameHostTransport
from kv_store.transfer.shared_memory import SharedBuffer

DEMO_BLOCK_BYTES = 32 * 30 * 2 * 3 * 64 * 2
"""32 tokens x 30 layers x (k, v) x 3 heads x 64 dims x 2 bytes."""
SIZES_MB = (0.5, 1, 4, 16, 64, 256)
MOVED_MB = 16
"""A measurement moves at least so much."""
IN_FLIGHT = 4
"""Most reads at a time."""
READ_DEADLINE_S = 30.0
PATTERN = 251
"""Block i of the owner is full of i modulo this prime."""


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--block-bytes", type=int, default=DEMO_BLOCK_BYTES)
    parser.add_argument("--network", action="store_true", help="do not copy through shared memory")
    options = parser.parse_args()
    result = measure(options.block_bytes, repeats=7 if options.quick else 25, is_shared=not options.network)
    print(json.dumps(result)) if options.json else _show(result)
    return 0


def measure(block_bytes: int, repeats: int, *, is_shared: bool = True) -> dict[str, Any]:
    """Measure every size, in two processes of their own.

    Raises:
        CalledProcessError: The reader or the owner failed; stderr says why.
    """
    output = subprocess.run(  # noqa: S603  # our own module
        _command("reader", block_bytes, repeats, int(is_shared)), check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def _command(*arguments: str | int) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), *map(str, arguments)]


def _make_transport(name: str, num_bytes: int, value: int, *, is_shared: bool) -> tuple[BlockTransport, torch.Tensor]:
    """A transport and its arena, full of `value`."""
    if not is_shared:
        arena = touched_arena(num_bytes, value)
        return NixlTransport(name, arena), arena
    shared = SharedBuffer(num_bytes)
    shared.tensor.fill_(value)
    return SameHostTransport(NixlTransport(name, shared.tensor), shared.tensor, shared), shared.tensor


def _own(block_bytes: int, *, is_shared: bool) -> None:
    """Be the owner until standard input ends."""
    transport, arena = _make_transport("owner", num_blocks(block_bytes) * block_bytes, 0, is_shared=is_shared)
    arena.view(-1, block_bytes).copy_((torch.arange(num_blocks(block_bytes)) % PATTERN)[:, None])
    print(transport.metadata().hex(), flush=True)
    sys.stdin.read()


def _read(block_bytes: int, repeats: int, *, is_shared: bool) -> None:
    """Be the reader: start an owner, measure, print."""
    with subprocess.Popen(  # noqa: S603  # our own module
        _command("owner", block_bytes, int(is_shared)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        metadata = bytes.fromhex(owner.stdout.readline())
        try:
            print(json.dumps(asyncio.run(_measure(metadata, block_bytes, repeats, is_shared=is_shared))), flush=True)
        finally:
            owner.kill()


async def _measure(metadata: bytes, block_bytes: int, repeats: int, *, is_shared: bool) -> dict[str, Any]:
    source = touched_arena(num_blocks(block_bytes) * block_bytes, 255)
    transport, arena = _make_transport("reader", len(source), 255, is_shared=is_shared)
    started_s = time.perf_counter()
    await transport.connect("owner", metadata)
    connect_ms = (time.perf_counter() - started_s) * 1e3
    reader = Reader(transport, arena, source, block_bytes)
    rows = {f"{size_mb:g}": await reader.measure(int(size_mb * 1e6), repeats) for size_mb in SIZES_MB}
    return {"sizes_mb": rows, "block_bytes": block_bytes, "connect_ms": round(connect_ms, 2)}


class Reader:
    """A connected reader with a second buffer of its own to copy from."""

    def __init__(self, transport: BlockTransport, arena: torch.Tensor, source: torch.Tensor, block_bytes: int) -> None:
        self._transport = transport
        # numpy copies in the caller's thread, whatever torch's thread count is.
        self._arena, self._source = arena.numpy(), source.numpy()
        self._block_bytes = block_bytes
        self._draw = random.Random(block_bytes)  # noqa: S311  # a shuffle, not a secret

    async def measure(self, size: int, repeats: int) -> dict[str, float]:
        """Alternate between the three; one round before the first is not counted."""
        num_reads = max(1, int(MOVED_MB * 1e6) // size)
        shape = (size, self._block_bytes)
        contiguous, scattered, memcpy, alone = [], [], [], []
        for _ in range(repeats + 1):
            contiguous.append(await self._time_reads(contiguous_reads(*shape, num_reads, self._draw)))
            scattered.append(await self._time_reads(scattered_reads(*shape, num_reads, self._draw)))
            memcpy.append(self._time_memcpy(chain(*scattered_reads(*shape, num_reads, self._draw))))
            alone.append(await self._time_reads(contiguous_reads(*shape, 1, self._draw)))
        moved = size * num_reads
        rates = [moved / statistics.median(times_s[1:]) / 1e9 for times_s in (contiguous, scattered, memcpy)]
        return {
            "gb_s": round(rates[0], 3),
            "memcpy_ratio": round(rates[0] / rates[2], 3),
            "scattered_ratio": round(rates[1] / rates[0], 3),
            "scattered_gb_s": round(rates[1], 3),
            "memcpy_gb_s": round(rates[2], 3),
            "alone_us": round(statistics.median(alone[1:]) * 1e6, 1),
        }

    async def _time_reads(self, reads: Sequence[Sequence[ByteRange]]) -> float:
        waiting = iter(reads)

        async def work() -> None:
            for ranges in waiting:
                await self._transport.read("owner", ranges, deadline_s=READ_DEADLINE_S)

        started_s = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(min(IN_FLIGHT, len(reads)))))
        elapsed_s = time.perf_counter() - started_s
        for piece in chain(*reads):
            self._check(piece)
        return elapsed_s

    def _check(self, piece: ByteRange) -> None:
        """See that both ends of a range are the owner's bytes, then spoil them for the next read."""
        for offset in (0, piece.size - 1):
            block = (piece.remote_offset + offset) // self._block_bytes
            assert int(self._arena[piece.local_offset + offset]) == block % PATTERN, "a read brought other bytes"
            self._arena[piece.local_offset + offset] = 255

    def _time_memcpy(self, ranges: Iterable[ByteRange]) -> float:
        places = [(piece.remote_offset, piece.local_offset, piece.size) for piece in ranges]
        started_s = time.perf_counter()
        copy_ranges(self._source, self._arena, places)
        return time.perf_counter() - started_s


def _show(result: Mapping[str, Any]) -> None:
    table = Table(title=f"reads of blocks of {result['block_bytes']:,} bytes between two processes")
    columns = {
        "contiguous GB/s": "gb_s",
        "of memcpy": "memcpy_ratio",
        "scattered GB/s": "scattered_gb_s",
        "of contiguous": "scattered_ratio",
        "memcpy GB/s": "memcpy_gb_s",
        "one alone, us": "alone_us",
    }
    for name in ("MB", *columns):
        table.add_column(name, justify="right")
    for size_mb, row in result["sizes_mb"].items():
        table.add_row(size_mb, *(f"{row[key]:.2f}" for key in columns.values()))
    Console().print(table)


def _run(arguments: Sequence[str]) -> int:
    match arguments:
        case ["owner", block_bytes, is_shared]:
            _own(int(block_bytes), is_shared=is_shared == "1")
        case ["reader", block_bytes, repeats, is_shared]:
            _read(int(block_bytes), int(repeats), is_shared=is_shared == "1")
        case _:
            return main()
    return 0


if __name__ == "__main__":
    status = 1
    try:
        status = _run(sys.argv[1:])
    except SystemExit as done:
        status = int(done.code or 0)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        # A process that made an agent crashes in the interpreter's own exit.
        os._exit(status)
