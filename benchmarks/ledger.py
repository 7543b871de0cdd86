"""How long a reservation takes: one caller, and as many at once as a busy cluster has.

    python benchmarks/ledger.py [--json] [--candidates 16]

Starts one real Valkey server. On each candidate a few reservations are pending beside some that its heartbeat counts
already, with a gap. A turn is a reserve; its release is not in the time. `reserve_us` is of one caller after the other,
`script_us` the server's own part in a step (mean of reserve and release), `busy` of several callers that share the
server and this process, `bare_us` the round trip of a PING.
"""

import sys
from pathlib import Path

# As a script: engine.py beside this file must not hide the package `engine`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import redis

from cluster.ledger import Ledger
from cluster.memory_ledger import MemoryLedger
from kv_store.embedded import EmbeddedValkey
from kv_store.redis_ledger import RedisLedger
from kv_store.registry.connection import ShardAddress, ShardLimits
from kv_store.registry.shard import RegistryShard, ShardHooks
from messages.reservations import Admitted, Candidate, Need

POOL = "decode"
NUM_PENDING = 4
NUM_ADMITTED = 12
BUSY_CALLERS = 16
TURNS = 2000
TTL_S = 600.0
LIMITS = ShardLimits(timeout_s=10.0, max_connections=BUSY_CALLERS)
NEED = Need(prefill_tokens=512, kv_tokens=1024)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--candidates", type=int, default=16)
    options = parser.parse_args()
    result = asyncio.run(_measure(options.candidates))
    print(json.dumps(result) if options.json else "\n".join(f"{name}: {value}" for name, value in result.items()))
    return 0


async def _measure(num_candidates: int) -> dict[str, float]:
    with EmbeddedValkey(num_shards=1) as servers:
        async with RedisLedger(servers.urls, limits=LIMITS) as ledger:
            candidates = await _fill(ledger, num_candidates)
            with redis.Redis.from_url(servers.urls[0]) as client:
                client.config_resetstat()
                alone = await _turns(ledger, candidates, TURNS, callers=1)
                steps = client.info("commandstats")["cmdstat_evalsha"]
            started_s = time.perf_counter()
            busy = await _turns(ledger, candidates, TURNS, callers=BUSY_CALLERS)
            busy_s = time.perf_counter() - started_s
        shard = RegistryShard(ShardAddress(servers.urls[0]), LIMITS, ShardHooks())
        bare = [await _timed(lambda: shard.run("ping", [("PING",)])) for _ in range(TURNS)]
        await shard.close()
    memory = MemoryLedger()
    alike = await _fill(memory, num_candidates)
    local = await _turns(memory, alike, TURNS, callers=1)
    return {
        "candidates": num_candidates,
        "pending_per_candidate": NUM_PENDING,
        "reserve_us": _median_us(alone),
        "reserve_p99_us": _p99_us(alone),
        "script_us": round(float(steps["usec_per_call"]), 1),
        "busy_callers": BUSY_CALLERS,
        "busy_p50_us": _median_us(busy),
        "busy_p99_us": _p99_us(busy),
        "busy_calls_s": round(2 * TURNS / busy_s),
        "memory_us": _median_us(local),
        "bare_us": _median_us(bare),
    }


async def _fill(ledger: Ledger, num_candidates: int) -> list[Candidate]:
    """Reserve on every worker, and let its heartbeat count all but the last few and one before."""
    for worker in range(num_candidates):
        for number in range(NUM_ADMITTED + NUM_PENDING):
            only = [_candidate(worker, ())]
            await ledger.reserve(POOL, only, NEED, nonce=f"{worker}/{number}", ttl_s=TTL_S)
    rows = {row.worker_id: row.issuer for row in await ledger.pending(POOL)}
    through, beyond = NUM_ADMITTED // 2 - 1, tuple(range(NUM_ADMITTED // 2 + 1, NUM_ADMITTED + 1))
    return [
        _candidate(worker, (Admitted(issuer=rows[f"worker-{worker}"], through=through, beyond=beyond),))
        for worker in range(num_candidates)
    ]


def _candidate(worker: int, admitted: tuple[Admitted, ...]) -> Candidate:
    return Candidate(
        worker_id=f"worker-{worker}",
        incarnation=f"{worker:032x}",
        cost=100.0 + worker / 7,
        cost_per_token=0.123,
        cost_per_request=1.5,
        room_tokens=200_000,
        admitted=admitted,
    )


async def _turns(ledger: Ledger, candidates: Sequence[Candidate], num_turns: int, *, callers: int) -> list[float]:
    seconds: list[float] = []

    async def call(caller: int) -> None:
        for turn in range(num_turns // callers):
            nonce = f"{callers}/{caller}/{turn}"
            seconds.append(await _timed(partial(ledger.reserve, POOL, candidates, NEED, nonce=nonce, ttl_s=TTL_S)))
            await ledger.release(POOL, nonce)

    async with asyncio.TaskGroup() as group:
        for caller in range(callers):
            group.create_task(call(caller))
    return seconds


async def _timed(ask: Callable[[], Awaitable[object]]) -> float:
    started_s = time.perf_counter()
    await ask()
    return time.perf_counter() - started_s


def _median_us(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1e6, 1)


def _p99_us(seconds: Sequence[float]) -> float:
    return round(statistics.quantiles(seconds, n=100)[98] * 1e6, 1)


if __name__ == "__main__":
    sys.exit(main())
