"""Lookups and publishes per second of the sharded registry, beside the same commands without our code.

    python benchmarks/registry.py [--json] [--quick] [--shards 1 2 4]

Starts real Valkey servers, publishes a million blocks of 64 workers, and lets two processes with four tasks each look
prompts up and then publish, as gateways and workers do. Every measurement alternates between our registry and the bare
commands (`benchmarks/bare_registry.py`), so that a machine that slows down slows both, and the servers' own counts are
compared to see that both are the same commands; `bare_ratio` is the lower of the two ratios of medians. A lookup is a
prompt of 512 to 8,000 tokens, a publish 16 blocks. `p99_ms` is of our lookups while all eight tasks are at it, so
waiting for each other is in it.

Servers and clients share the machine's cores. On 2 cores, 1 shard and 2 clients fill them already: more shards then
bring more round trips and no more cores, and their rows show what sharding costs, not what it gives.
"""

import sys
from pathlib import Path

# As a script: engine.py beside this file must not hide the package `engine`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import json
import multiprocessing
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import redis
from rich.console import Console
from rich.table import Table

from benchmarks.registry_blocks import Population
from benchmarks.registry_client import PUBLISHED_TOGETHER, Kind, Settings, run_client
from benchmarks.turns import Done, Side, rate_of
from kv_store.embedded import EmbeddedValkey

CLIENTS = 2
UNCOUNTED = ("cmdstat_info", "cmdstat_hello", "cmdstat_client|setinfo")
SHARD_MEMORY_BYTES = 4 << 30
QUICK = Population(blocks_per_worker=1500)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--quick", action="store_true", help="a tenth of the blocks and shorter turns")
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    population = QUICK if options.quick else Population()
    seconds, repeats = (0.5, 3) if options.quick else (2.0, 5)
    console = Console(stderr=True)
    rows, sizes = {}, []
    for num_shards in options.shards:
        with Bench.start(num_shards, population) as bench:
            bytes_per_block, blocks_s = bench.fill()
            console.log(f"{num_shards} shards: {population.num_blocks:,} blocks at {blocks_s:,.0f}/s")
            rows[str(num_shards)] = measure(bench, seconds, repeats)
            sizes.append(bytes_per_block)
            console.log(f"{num_shards} shards: {rows[str(num_shards)]}")
    result = {
        "shards": rows,
        "bytes_per_block": round(statistics.median(sizes), 1),
        "blocks": population.num_blocks,
        "distinct_blocks": population.num_distinct_blocks,
        "workers": population.num_workers,
    }
    print(json.dumps(result)) if options.json else _show(result)
    return 0


class Bench:
    """Running shards with running clients."""

    def __init__(self, urls: Sequence[str], pipes: Sequence[Connection], population: Population) -> None:
        self._shards = [redis.Redis.from_url(url) for url in urls]
        self._pipes = pipes
        self._population = population

    @classmethod
    @contextmanager
    def start(cls, num_shards: int, population: Population) -> Iterator["Bench"]:
        """Start shards and clients; all are gone afterwards."""
        spawn = multiprocessing.get_context("spawn")
        with ExitStack() as stack:
            shards = stack.enter_context(EmbeddedValkey(num_shards, max_memory_bytes=SHARD_MEMORY_BYTES))
            pipes = []
            for number in range(CLIENTS):
                ours, theirs = spawn.Pipe()
                settings = Settings(urls=shards.urls, number=number, num_clients=CLIENTS, population=population)
                process = spawn.Process(target=run_client, args=(settings, theirs), daemon=True)
                process.start()
                theirs.close()
                # Closed first, on leaving: that is what ends the process.
                stack.callback(process.join)
                stack.callback(ours.close)
                pipes.append(ours)
            yield cls(shards.urls, pipes, population)

    def fill(self) -> tuple[float, float]:
        """Publish everything.

        Returns:
            Bytes of server memory per block, and blocks published per second.
        """
        before = self._used_bytes()
        done = self._turn("fill")
        size_bytes = self._used_bytes() - before
        self._turn("prepare")
        return size_bytes / self._population.num_blocks, rate_of(done)

    def compare(self, ours: Kind, bare: Kind, seconds: float, repeats: int) -> tuple["Side", "Side"]:
        """Alternate between ours and bare.

        Raises:
            RuntimeError: The servers ran other commands for bare than for ours.
        """
        sides = {ours: Side(), bare: Side()}
        for repeat in range(repeats):
            # Who goes first changes, so that neither always follows the other.
            for kind in (ours, bare)[:: 1 if repeat % 2 == 0 else -1]:
                before = self._calls()
                sides[kind].add(self._turn(kind, seconds), self._calls() - before)
        sides[ours].check_same_commands(sides[bare])
        return sides[ours], sides[bare]

    def _turn(self, kind: Kind, seconds: float = 0.0) -> list[Done]:
        for pipe in self._pipes:
            pipe.send((kind, seconds))
        answers: list[Done | Exception] = [pipe.recv() for pipe in self._pipes]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return [answer for answer in answers if isinstance(answer, Done)]

    def _used_bytes(self) -> int:
        return sum(int(shard.info("memory")["used_memory"]) for shard in self._shards)

    def _calls(self) -> Counter[str]:
        """How often each command has run on any shard, those inside scripts included."""
        calls: Counter[str] = Counter()
        for shard in self._shards:
            for name, row in shard.info("commandstats").items():
                if name not in UNCOUNTED:
                    calls[name.removeprefix("cmdstat_")] += row["calls"]
        return calls


def measure(bench: Bench, seconds: float, repeats: int) -> dict[str, float]:
    """One row of the result."""
    lookups, bare_lookups = bench.compare("lookup", "bare_lookup", seconds, repeats)
    publishes, bare_publishes = bench.compare("publish", "bare_publish", seconds, repeats)
    ratios = lookups.rate / bare_lookups.rate, publishes.rate / bare_publishes.rate
    return {
        "lookups_s": round(lookups.rate, 1),
        "publishes_s": round(publishes.rate, 1),
        "bare_ratio": round(min(ratios), 3),
        "p99_ms": round(statistics.quantiles(lookups.latencies_s, n=100)[-1] * 1e3, 2),
        "lookups_bare_ratio": round(ratios[0], 3),
        "publishes_bare_ratio": round(ratios[1], 3),
        "bare_lookups_s": round(bare_lookups.rate, 1),
        "bare_publishes_s": round(bare_publishes.rate, 1),
        "bare_p99_ms": round(statistics.quantiles(bare_lookups.latencies_s, n=100)[-1] * 1e3, 2),
        "published_blocks_s": round(publishes.rate * PUBLISHED_TOGETHER, 1),
    }


def _show(result: Mapping[str, Any]) -> None:
    table = Table(title=f"registry of {result['blocks']:,} blocks, {result['bytes_per_block']} bytes each")
    columns = {
        "lookups/s": "lookups_s",
        "of bare": "lookups_bare_ratio",
        "p99 ms": "p99_ms",
        "bare p99 ms": "bare_p99_ms",
        "publishes/s": "publishes_s",
        "of bare ": "publishes_bare_ratio",
        "blocks/s": "published_blocks_s",
    }
    for name in ("shards", *columns):
        table.add_column(name, justify="right")
    for num_shards, row in result["shards"].items():
        table.add_row(num_shards, *(f"{row[key]:,}" for key in columns.values()))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
