"""What it takes to place one request of 100,000 tokens among 1,000 workers: hash it, look it up, decide.

    python benchmarks/routing.py [--json] [--workers 1000] [--tokens 100000] [--quick]

`decision_us` is from the snapshot and the array of matched prefixes to the chosen pair, without an explanation;
`hash_ms` from token ids to the keys of all full blocks; `lookup_ms` one lookup in the registry, all of whose blocks are
held, so that it goes to the end. Each alternates with the least that could do something like it, so that a machine that
slows down slows both: numpy's argmin over two finished columns of costs, one digest of the prompt's bytes, and the same
commands to the same servers without our code. The table shows also what belongs to a decision in a gateway: asking the
pools, wording the candidates for the ledger, and one heartbeat. Medians.
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
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.bare_registry import BareCommands, BareRegistry
from benchmarks.bare_routing import BareChoice, hash_whole
from benchmarks.routing_cluster import BLOCK_SIZE, RoutedCluster
from kv_store.block_key import KeyExtras, block_keys, root_key
from kv_store.embedded import EmbeddedValkey
from kv_store.registry.connection import ShardLimits
from kv_store.registry.protocol import WorkerRecord
from kv_store.registry.redis import RedisRegistry
from messages.errors import RegistryError
from messages.handoff import BlockKey

NAMESPACE = "bench"
NUM_SHARDS, NUM_HOLDERS = 2, 4
LEASE_S, TIMEOUT_S = 3600.0, 20.0
VOCABULARY = 50_000
EXTRAS = KeyExtras(model="0" * 64, block_size=BLOCK_SIZE, codec="raw")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Seconds of ours and of the bare one, medians."""

    ours_s: float
    bare_s: float


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=100_000, help="length of the prompt")
    parser.add_argument("--quick", action="store_true", help="a fifth of the repeats")
    options = parser.parse_args()
    repeats = 1 if options.quick else 5
    draw = random.Random(1)  # noqa: S311 - a prompt, not a secret
    prompt = [draw.randrange(VOCABULARY) for _ in range(options.tokens)]
    result = measure_decision(options.workers, options.tokens, 400 * repeats)
    hashing = measure_hash(prompt, 10 * repeats)
    lookup = asyncio.run(measure_lookup(prompt, options.workers, 6 * repeats))
    result |= {
        "hash_ms": round(hashing.ours_s * 1e3, 2),
        "hash_bare_ms": round(hashing.bare_s * 1e3, 2),
        "lookup_ms": round(lookup.ours_s * 1e3, 2),
        "lookup_bare_ms": round(lookup.bare_s * 1e3, 2),
    }
    print(json.dumps(result)) if options.json else _show(result, options.workers, options.tokens)
    return 0


def measure_decision(num_workers: int, prompt_tokens: int, repeats: int) -> dict[str, float]:
    """Decide again and again, each time for another request, while heartbeats come in."""
    cluster, bare = RoutedCluster(num_workers, prompt_tokens), BareChoice(num_workers)
    cluster.prepare_candidates()
    works: dict[str, Callable[[int], object]] = {
        "decision_us": cluster.decide,
        "decision_bare_us": lambda _: bare.choose(),
        "decision_with_pools_us": cluster.decide_with_pools,
        "candidates_us": lambda _: cluster.word_candidates(),
        "heartbeat_us": lambda _: cluster.beat(),
    }
    times_s: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(repeats):
        for name, work in works.items():
            started_s = time.perf_counter()
            work(repeat)
            times_s[name].append(time.perf_counter() - started_s)
    return {name: round(statistics.median(each) * 1e6, 1) for name, each in times_s.items()}


def measure_hash(prompt: Sequence[int], repeats: int) -> Pair:
    """Hash one prompt into block keys, and once its bytes."""
    data, root = np.asarray(prompt, "<u4").tobytes(), root_key(EXTRAS)
    ours_s, bare_s = [], []
    for _ in range(repeats):
        started_s = time.perf_counter()
        block_keys(root, prompt, BLOCK_SIZE)
        middle_s = time.perf_counter()
        hash_whole(data)
        ours_s.append(middle_s - started_s)
        bare_s.append(time.perf_counter() - middle_s)
    return Pair(ours_s=statistics.median(ours_s), bare_s=statistics.median(bare_s))


async def measure_lookup(prompt: Sequence[int], num_workers: int, repeats: int) -> Pair:
    """Look up a prompt that some of `num_workers` hold whole, on servers of this machine.

    Raises:
        RegistryError: It was not found whole.
    """
    keys = block_keys(root_key(EXTRAS), prompt, BLOCK_SIZE)
    with EmbeddedValkey(NUM_SHARDS) as shards:
        limits = ShardLimits(timeout_s=TIMEOUT_S)
        commands = BareCommands(shards.urls, NAMESPACE)
        async with RedisRegistry(shards.urls, NAMESPACE, limits=limits) as registry, BareRegistry(shards.urls) as bare:
            await _fill(registry, keys, num_workers)
            batches = commands.lookup(keys, await bare.table_versions(commands))

            async def look_up() -> None:
                hits = await registry.lookup(keys)
                if max(hits.by_worker.values(), default=0) != len(keys):
                    raise RegistryError("the prompt was not found whole")

            ours_s, bare_s = [], []
            for _ in range(repeats):
                ours_s.append(await _time_s(look_up))
                bare_s.append(await _time_s(lambda: bare.lookup(batches)))
    return Pair(ours_s=statistics.median(ours_s), bare_s=statistics.median(bare_s))


async def _fill(registry: RedisRegistry, keys: Sequence[BlockKey], num_workers: int) -> None:
    for number in range(num_workers):
        await registry.register(_record(number), lease_s=LEASE_S)
    for number in range(NUM_HOLDERS):
        record = _record(number)
        await registry.publish(record.worker_id, record.incarnation, keys)


async def _time_s(work: Callable[[], Awaitable[None]]) -> float:
    started_s = time.perf_counter()
    await work()
    return time.perf_counter() - started_s


def _record(number: int) -> WorkerRecord:
    return WorkerRecord(
        worker_id=f"worker-{number}",
        incarnation=f"{number:032x}",
        address=f"10.0.{number // 250}.{number % 250}:9100",
        pool="decode",
        role="decode",
        model="bench",
        fingerprint="0" * 32,
        block_size=BLOCK_SIZE,
        key_model=EXTRAS.model,
        key_codec=EXTRAS.codec,
        context_length=131_072,
    )


def _show(result: dict[str, float], num_workers: int, prompt_tokens: int) -> None:
    table = Table(title=f"one request of {prompt_tokens:,} tokens among {num_workers:,} workers")
    for name in ("", "ours", "bare", "unit"):
        table.add_column(name, justify="left" if name in ("", "unit") else "right")
    for title, name, bare in (
        ("decision", "decision_us", "decision_bare_us"),
        ("decision, pools asked", "decision_with_pools_us", None),
        ("candidates for the ledger", "candidates_us", None),
        ("heartbeat", "heartbeat_us", None),
        ("hash", "hash_ms", "hash_bare_ms"),
        ("lookup", "lookup_ms", "lookup_bare_ms"),
    ):
        unit = name.rpartition("_")[2]
        table.add_row(title, f"{result[name]:,}", f"{result[bare]:,}" if bare else "", unit)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
