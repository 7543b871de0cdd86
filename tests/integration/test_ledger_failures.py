"""The ledger over servers that die, stop, fill up, forget its scripts or move its slot."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import redis
from redis.crc import key_slot

from cluster.degrading_ledger import DegradingLedger, LedgerPatience
from kv_store import redis_ledger
from kv_store.embedded import EmbeddedValkey
from kv_store.redis_ledger import RedisLedger
from kv_store.registry.shard import ShardFailure, ShardHooks, ShardLimits
from messages.errors import RegistryError
from tests.contract.ledger_places import NEED, POOL, TTL_S, candidate, reserve_on
from tests.contract.registry_servers import Cluster, running_cluster

pytestmark = pytest.mark.redis

LIMITS = ShardLimits(timeout_s=1.0, cooldown_s=0.05)
PATIENCE = LedgerPatience(timeout_s=1.0, first_wait_s=0.05, max_wait_s=0.1)
PAIR = [candidate("a"), candidate("b")]


@pytest.fixture
def servers() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey(num_shards=1) as servers:
        yield servers


@pytest.fixture
async def shared(servers: EmbeddedValkey) -> AsyncIterator[RedisLedger]:
    async with RedisLedger(servers.urls, "n", limits=LIMITS) as ledger:
        yield ledger


@pytest.fixture
def client(servers: EmbeddedValkey) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(servers.urls[0]) as client:
        yield client


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


async def until(condition: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up_s
        await asyncio.sleep(0.01)


def fill(client: redis.Redis) -> None:
    with suppress(redis.exceptions.OutOfMemoryError):
        for number in range(1000):
            client.set(f"block-{number}", bytes(100_000))


async def test_a_dead_shard_leaves_each_gateway_its_own_view_until_it_is_back(servers: EmbeddedValkey) -> None:
    """Window W0, a shard dies: the request goes on, nothing is left behind on either side."""
    gateways = [DegradingLedger(RedisLedger(servers.urls, "n", limits=LIMITS), patience=PATIENCE) for _ in range(2)]
    before = await gateways[0].reserve(POOL, PAIR, NEED, nonce="r/1", ttl_s=TTL_S)

    servers.kill_shard(0)
    alone = [await ledger.reserve(POOL, PAIR, NEED, nonce=f"r/2/{i}", ttl_s=TTL_S) for i, ledger in enumerate(gateways)]
    assert [ledger.is_degraded for ledger in gateways] == [True, True]
    assert [row.worker_id for row in alone] == ["a", "a"]
    assert await gateways[0].release(POOL, "r/1") is False

    servers.restart_shard(0)
    await until(lambda: not any(ledger.is_degraded for ledger in gateways))
    after = [await ledger.reserve(POOL, PAIR, NEED, nonce=f"r/3/{i}", ttl_s=TTL_S) for i, ledger in enumerate(gateways)]

    assert [row.worker_id for row in after] == ["a", "b"]
    assert (after[0].sequence, before.sequence) == (1, 1)
    assert after[0].issuer != before.issuer, "what the worker has admitted of the old ones says nothing of the new"
    ended = [await gateways[i].release(POOL, f"r/{k}/{i}") for i in range(2) for k in (2, 3)]
    assert ended == [True] * 4
    assert [await ledger.pending(POOL) for ledger in gateways] == [[], []]
    for ledger in gateways:
        await ledger.close()


async def test_a_stopped_server_costs_one_deadline_and_keeps_nothing_of_what_it_heard_late(
    servers: EmbeddedValkey,
) -> None:
    patience = LedgerPatience(timeout_s=0.2, first_wait_s=0.05, max_wait_s=0.1)
    async with DegradingLedger(RedisLedger(servers.urls, "n", limits=LIMITS), patience=patience) as ledger:
        await reserve_on(ledger, "r/1", PAIR)
        os.kill(servers.process_ids[0], signal.SIGSTOP)
        try:
            started_s = time.monotonic()
            await asyncio.gather(*(reserve_on(ledger, f"r/late/{number}", PAIR) for number in range(5)))
            for number in range(50):
                await reserve_on(ledger, f"r/local/{number}", PAIR)
            elapsed_s = time.monotonic() - started_s
        finally:
            os.kill(servers.process_ids[0], signal.SIGCONT)
        await until(lambda: not ledger.is_degraded)

        async with RedisLedger(servers.urls, "n", limits=LIMITS) as other:
            kept = [row.nonce for row in await other.pending(POOL)]

    assert elapsed_s < 5 * 0.2
    assert kept == ["r/1"]


async def test_a_cancelled_reserve_is_taken_back(servers: EmbeddedValkey, shared: RedisLedger) -> None:
    """Window W0, the client cancels."""
    async with DegradingLedger(RedisLedger(servers.urls, "n", limits=LIMITS), patience=PATIENCE) as ledger:
        for number in range(30):
            asking = asyncio.create_task(reserve_on(ledger, f"r/{number}", PAIR))
            for _ in range(number % 6):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            if not asking.cancelled():
                await ledger.release(POOL, f"r/{number}")

    assert await shared.pending(POOL) == []


async def test_a_server_full_of_blocks_still_keeps_reservations(tmp_path: Path) -> None:
    with EmbeddedValkey(num_shards=1, directory=tmp_path, max_memory_bytes=4 << 20) as servers:
        with redis.Redis.from_url(servers.urls[0]) as client:
            fill(client)
            with pytest.raises(redis.exceptions.OutOfMemoryError):
                client.set("one more", bytes(100_000))
        async with RedisLedger(servers.urls, "n", limits=LIMITS) as ledger:
            await reserve_on(ledger, "r", PAIR)

            assert await ledger.release(POOL, "r") is True
            assert await ledger.forget(POOL, "a", "life-1") == 0
            assert await ledger.pending(POOL) == []


async def test_a_server_that_lost_the_scripts_gets_them_again(servers: EmbeddedValkey, client: redis.Redis) -> None:
    failures: list[ShardFailure] = []
    hooks = ShardHooks(on_failure=failures.append)
    async with RedisLedger(servers.urls, "n", limits=LIMITS, hooks=hooks) as ledger:
        await reserve_on(ledger, "r/1", PAIR)

        client.script_flush()

        assert await ledger.release(POOL, "r/1") is True
    assert failures == []


async def test_a_shard_that_is_gone_is_a_registry_error(servers: EmbeddedValkey, shared: RedisLedger) -> None:
    await reserve_on(shared, "r", PAIR)
    servers.kill_shard(0)

    for ask in (
        lambda: reserve_on(shared, "r", PAIR),
        lambda: shared.release(POOL, "r"),
        lambda: shared.forget(POOL, "a", "life-1"),
        lambda: shared.pending(POOL),
    ):
        with pytest.raises(RegistryError):
            await ask()


async def test_every_key_of_a_pool_has_an_end_and_lies_in_one_slot(shared: RedisLedger, client: redis.Redis) -> None:
    await reserve_on(shared, "r", PAIR)
    await shared.release("never used", "r")

    names = client.keys("*")
    assert len(names) == 3 + 2
    assert all(0 < client.pttl(name) <= 2 * 3600 * 1000 for name in names)
    assert len({key_slot(name) for name in names if POOL.encode() in name}) == 1


async def test_what_has_ended_leaves_no_memory_behind(
    shared: RedisLedger, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_ledger, "_KEEP_MS", 400)
    monkeypatch.setattr(redis_ledger, "_OVERTAKEN_MS", 50)
    workers = [candidate(f"worker-{number}", number / 100) for number in range(16)]
    first = await shared.reserve(POOL, workers, NEED, nonce="first", ttl_s=0.05)
    await asyncio.gather(*(reserve_on(shared, f"r/{number}", workers, ttl_s=0.05) for number in range(300)))
    await asyncio.gather(*(shared.release(POOL, f"r/{number}") for number in range(0, 300, 2)))

    await asyncio.sleep(0.45)
    for _ in range(20):
        await shared.pending(POOL)

    sizes = [client.hlen(name) if client.type(name) == b"hash" else client.zcard(name) for name in client.keys("*")]
    assert sum(sizes) <= 1, "the count of what is open"
    assert shared.num_open == 0
    again = await shared.reserve(POOL, workers, NEED, nonce="again", ttl_s=TTL_S)
    assert (again.worker_id, again.sequence) == (first.worker_id, 1)
    assert again.issuer != first.issuer


async def test_a_pool_follows_its_slot_through_the_cluster(cluster: Cluster) -> None:
    """Rule 8."""
    slot = key_slot(b"kvferry/n/l{p/decode}w")
    home = min(2, slot // 5461)
    target = (home + 1) % 3
    async with RedisLedger(cluster.urls[:1], "n", limits=LIMITS, is_cluster=True) as ledger:
        await reserve_on(ledger, "r/1", PAIR)
        await reserve_on(ledger, "r/2", PAIR)

        cluster.move_slot(slot, home, target, is_finished=False)
        assert await ledger.release(POOL, "r/1") is True
        assert await reserve_on(ledger, "r/3", PAIR) == "a"

        cluster.move_slot(slot, home, target, is_finished=True)
        assert {row.nonce for row in await ledger.pending(POOL)} == {"r/2", "r/3"}
        assert await ledger.release(POOL, "r/2") is True
        assert await ledger.release(POOL, "r/3") is True
        assert await ledger.pending(POOL) == []
        cluster.move_slot(slot, target, home, is_finished=True)
