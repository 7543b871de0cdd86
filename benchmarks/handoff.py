"""What a hand-off of KV blocks costs: time to token 1, transfer, and how much of it decode had to wait for.

    python benchmarks/handoff.py [--json] [--repeats 3] [--dtype bfloat16] [--throttle GB_S]

Starts a whole local system (real model, NIXL) and sends fresh prompts, one at a time. `memcpy_gb_s` is the same number
of equally large, scattered blocks copied by one thread in the same run: the ceiling of any transfer on this machine.

With `--throttle` the decode worker's fault point slows every read down to that rate. `serial_ms` is what the bytes take
at that rate after each other, `bound_ms` what decode may have to wait for at most: the last chunk's bytes, and 10 ms.
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
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from benchmarks.baseline import memcpy_blocks
from deployments.config import FAULTS_VARIABLE, AppConfig, load_config
from deployments.local_stack import LocalStack
from deployments.preflight import free_ports
from kvferry import AsyncClient
from kvferry.results import Completion

PROMPT_TOKENS = (512, 2048, 6000)
OUTPUT_TOKENS = 8
VOCABULARY = range(1000, 40_000)
"""Ordinary tokens of the demo model; a prompt is drawn at random, so no prefix is ever cached."""


@dataclass(frozen=True)
class Row:
    """Medians for one prompt length."""

    prompt_tokens: int
    ttft_ms: float
    transfer_ms: float
    exposed_ms: float
    transfer_gb_s: float
    memcpy_gb_s: float
    size_bytes: int
    serial_ms: float | None = None
    """Of all bytes at the throttled rate; None: not throttled."""
    bound_ms: float | None = None


def main() -> int:
    """Run the benchmark and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--repeats", type=int, default=3, help="fresh prompts per length; medians are shown")
    parser.add_argument("--dtype", default="auto", help="of weights and KV")
    parser.add_argument("--throttle", type=float, metavar="GB_S", help="slow the reads down to this rate")
    arguments = parser.parse_args()
    console, config = Console(stderr=True), _config(arguments.dtype)
    if arguments.throttle:
        os.environ[FAULTS_VARIABLE] = f"transfer.read:throttle={arguments.throttle}@decode"
    with LocalStack(config, console.log) as stack:
        rows = [asyncio.run(_measure(stack.grpc_address, tokens, arguments.repeats)) for tokens in PROMPT_TOKENS]
    if arguments.throttle:
        rows = [_with_bounds(row, arguments.throttle, config.model.chunk_tokens("prefill")) for row in rows]
    if arguments.json:
        print(json.dumps({"prompts": [vars(row) for row in rows]}))
    else:
        Console().print(_table(rows))
    return 0


def _config(dtype: str) -> AppConfig:
    grpc_port, http_port = free_ports(2)
    return load_config(None, {"models.0.dtype": dtype, "gateway.grpc_port": grpc_port, "gateway.http_port": http_port})


async def _measure(address: str, prompt_tokens: int, repeats: int) -> Row:
    draw = random.Random(prompt_tokens)  # noqa: S311 - prompts, not secrets
    done: list[Completion] = []
    async with AsyncClient(address) as client:
        for _ in range(repeats):
            prompt = [draw.choice(VOCABULARY) for _ in range(prompt_tokens)]
            done.append(await client.generate(prompt, max_tokens=OUTPUT_TOKENS, temperature=0.0))
    moved = [completion.provenance for completion in done]
    blocks, size = moved[0].blocks_moved, moved[0].bytes_moved
    return Row(
        prompt_tokens=prompt_tokens,
        ttft_ms=round(statistics.median(c.timings.first_token_s for c in done) * 1e3, 1),
        transfer_ms=round(statistics.median(m.transfer_s for m in moved) * 1e3, 2),
        exposed_ms=round(statistics.median(m.exposed_s for m in moved) * 1e3, 2),
        transfer_gb_s=round(statistics.median(m.bytes_moved / m.transfer_s for m in moved) / 1e9, 2),
        memcpy_gb_s=round(memcpy_blocks(num_blocks=blocks, block_bytes=size // blocks), 2),
        size_bytes=size,
    )


def _with_bounds(row: Row, throttle_gb_s: float, chunk_tokens: int) -> Row:
    serial_ms = row.size_bytes / throttle_gb_s / 1e6
    last_chunk = (row.prompt_tokens - 1) % chunk_tokens + 1
    bound_ms = serial_ms * last_chunk / row.prompt_tokens + 10
    return replace(row, serial_ms=round(serial_ms, 1), bound_ms=round(bound_ms, 1))


def _table(rows: list[Row]) -> Table:
    table = Table(title="hand-off of KV blocks, one request at a time")
    names = ["prompt tokens", "TTFT ms", "transfer ms", "exposed ms", "transfer GB/s", "memcpy GB/s", "ratio"]
    if rows[0].bound_ms is not None:
        names += ["serial ms", "bound ms"]
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        ratio = row.transfer_gb_s / row.memcpy_gb_s
        table.add_row(
            str(row.prompt_tokens),
            f"{row.ttft_ms:.0f}",
            f"{row.transfer_ms:.1f}",
            f"{row.exposed_ms:.1f}",
            f"{row.transfer_gb_s:.2f}",
            f"{row.memcpy_gb_s:.2f}",
            f"{ratio:.2f}",
            *([] if row.bound_ms is None else [f"{row.serial_ms:.0f}", f"{row.bound_ms:.0f}"]),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
