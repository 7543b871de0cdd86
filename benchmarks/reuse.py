"""Time to the first token of a prompt whose first 4,000 tokens are known: nowhere, here, or to another worker.

    python benchmarks/reuse.py [--json] [--repeats 3] [--dtype bfloat16]

Starts a whole local system with two unified workers on the demo model. Every round draws a fresh prefix and sends it,
each time with another short question: first it is computed, then the same worker finds it in its cache. Then streams
that keep running are sent until that worker is so loaded that the router prefers the other one, which fetches the
prefix: its first token is what counts for `peer_ms`, so the lender is decoding meanwhile. What really happened is read
from what each answer says of itself; a round in which nothing was fetched ends the benchmark. Medians of the rounds
after the first.
"""

import sys
from pathlib import Path

# As a script: engine.py beside this file must not hide the package `engine`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import asyncio
import json
import random
import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.reuse_rounds import Round, read_round
from deployments.config import AppConfig, load_config
from deployments.local_stack import LocalStack
from deployments.preflight import free_ports
from kvferry import AsyncClient
from kvferry.results import Completion

PREFIX_TOKENS, QUESTION_TOKENS = 4000, 16
VOCABULARY = range(1000, 40_000)
"""Ordinary tokens of the demo model; a prefix is drawn at random, so it is cached nowhere."""
BUSY_STREAMS = 5
"""Each weighs 32 tokens on its worker, and a fetch weighs 64 and more."""
BUSY_TOKENS = 150
"""So long that the first of them still runs when the last one is sent."""
SETTLE_S = 1.0
"""For the registry and the router to hear of the last request."""


def main() -> int:
    """Run the benchmark and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--repeats", type=int, default=3, help="rounds that count; one more goes before")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and KV")
    options = parser.parse_args()
    console = Console(stderr=True)
    with LocalStack(_config(options.dtype), console.log) as stack:
        block_size = stack.config.model.block_size
        rounds = asyncio.run(_measure(stack.grpc_address, block_size, options.repeats, console))
    result = _summary(rounds)
    print(json.dumps(result)) if options.json else _show(result)
    return 0


def _config(dtype: str) -> AppConfig:
    grpc_port, http_port = free_ports(2)
    return load_config(
        None,
        {
            "models.0.dtype": dtype,
            "pools": [{"name": "unified", "role": "unified", "replicas": 2, "num_threads": 1}],
            # What a worker of this machine measures; until it has, the router goes by these.
            "reuse.assumed_prefill_tokens_s": 500.0,
            "reuse.assumed_transfer_gb_s": 5.0,
            "gateway.grpc_port": grpc_port,
            "gateway.http_port": http_port,
        },
    )


async def _measure(address: str, block_size: int, repeats: int, console: Console) -> list[Round]:
    draw = random.Random(PREFIX_TOKENS)  # noqa: S311 - prompts, not secrets
    rounds = []
    async with AsyncClient(address) as client:
        for number in range(repeats + 1):
            rounds.append(await _round(client, draw, block_size))
            console.log(f"round {number}: {rounds[-1]}")
    return rounds[1:]


async def _round(client: AsyncClient, draw: random.Random, block_size: int) -> Round:
    prefix = _draw_tokens(draw, PREFIX_TOKENS)

    async def ask(max_tokens: int) -> Completion:
        prompt = prefix + _draw_tokens(draw, QUESTION_TOKENS)
        return await client.generate(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)

    computed = await ask(1)
    await asyncio.sleep(SETTLE_S)
    local = await ask(1)
    async with asyncio.TaskGroup() as group:
        streams = []
        for _ in range(BUSY_STREAMS):
            await asyncio.sleep(SETTLE_S)
            streams.append(group.create_task(ask(BUSY_TOKENS)))
    done = [stream.result() for stream in streams]
    return read_round(computed, local, done, prefix_tokens=PREFIX_TOKENS, block_size=block_size)


def _draw_tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.choice(VOCABULARY) for _ in range(count)]


def _summary(rounds: Sequence[Round]) -> dict[str, float]:
    columns = ("computed_ms", "local_ms", "peer_ms", "transfer_ms", "blocks_moved", "bytes_moved", "lender_streams")
    result = {name: round(statistics.median(getattr(row, name) for row in rounds), 1) for name in columns}
    return {**result, "peer_ratio": round(result["peer_ms"] / result["computed_ms"], 4)}


def _show(result: dict[str, float]) -> None:
    table = Table(title=f"first token of a prompt with a known prefix of {PREFIX_TOKENS:,} tokens")
    for name in ("prefix was", "TTFT ms", "of computed"):
        table.add_column(name, justify="right")
    for label, name in (("computed", "computed_ms"), ("cached here", "local_ms"), ("fetched", "peer_ms")):
        table.add_row(label, f"{result[name]:,.1f}", f"{result[name] / result['computed_ms']:.3f}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
