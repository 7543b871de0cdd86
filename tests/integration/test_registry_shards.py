"""A registry whose shards die, freeze, fill up, forget and come back."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import redis

from kv_store.embedded import EmbeddedValkey
from kv_store.registry.protocol import Claimant, PrefixHits, WorkerRecord
from kv_store.registry.redis import RedisRegistry, shard_name
from kv_store.registry.shard import ShardFailure, ShardLimits
from kv_store.sharding import RendezvousSharding
from messages.errors import RegistryError
from messages.handoff import BlockKey
from tests.contract.registry_servers import free_port, make_server

pytestmark = pytest.mark.redis

LIMITS = ShardLimits(timeout_s=2.0, cooldown_s=0.1)
WORKER = WorkerRecord(
    worker_id="a",
    incarnation="life-1",
    address="127.0.0.1:1",
    pool="short",
    role="unified",
    model="tiny",
    fingerprint="f" * 32,
    block_size=32,
    key_model="tiny@1",
    key_codec="raw-float32",
    context_length=8192,
)
KEYS = [BlockKey(sha256(str(index).encode()).digest()) for index in range(64)]


@pytest.fixture(scope="session")
def running_servers() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey(num_shards=2) as servers:
        yield servers


@pytest.fixture
def servers(running_servers: EmbeddedValkey) -> EmbeddedValkey:
    for index, url in enumerate(running_servers.urls):
        with redis.Redis.from_url(url) as client:
            try:
                client.flushall()
            except redis.ConnectionError:
                running_servers.restart_shard(index)
    return running_servers


def shard_of_each(urls: list[str]) -> list[int]:
    sharding = RendezvousSharding([shard_name(url) for url in urls])
    return [sharding.shard_of(key) for key in KEYS]


def keys_on(urls: list[str], shard: int) -> list[BlockKey]:
    return [key for key, place in zip(KEYS, shard_of_each(urls), strict=True) if place == shard]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    give_up_s = time.monotonic() + 15
    while time.monotonic() < give_up_s:
        if await condition():
            return
        await asyncio.sleep(0.02)
    pytest.fail("the registry did not get there in time")


async def registered(registry: RedisRegistry) -> RedisRegistry:
    await registry.register(WORKER, lease_s=60)
    await registry.publish("a", "life-1", KEYS)
    return registry


async def test_keys_and_worker_table_lie_where_the_design_says(servers: EmbeddedValkey) -> None:
    async with RedisRegistry(servers.urls, "n", limits=LIMITS) as registry:
        await registered(registry)

    for index, url in enumerate(servers.urls):
        with redis.Redis.from_url(url) as client:
            found = set(client.keys())
            blocks = (b"kvferry/n/b/" + key for key in keys_on(servers.urls, index))
            assert found == {b"kvferry/n/w", b"kvferry/n/m", *blocks}
            assert all(client.pttl(key) > 0 for key in found)


async def test_one_dead_shard_is_unknown_and_the_rest_still_counts(servers: EmbeddedValkey) -> None:
    """Rule 9."""
    failures: list[ShardFailure] = []
    async with RedisRegistry(servers.urls, "n", limits=LIMITS, on_failure=failures.append) as registry:
        await registered(registry)
        servers.kill_shard(1)

        hits = await registry.lookup(KEYS)

        places = shard_of_each(servers.urls)
        last_confirmed = max(position for position, shard in enumerate(places) if shard == 0)
        assert hits == PrefixHits(by_worker={"a": last_confirmed + 1}, unknown=True)
        assert await registry.workers() == [WORKER]
        assert {failure.shard for failure in failures} == {shard_name(servers.urls[1])}


async def test_a_miss_on_the_live_shard_still_ends_the_prefix(servers: EmbeddedValkey) -> None:
    """Rule 9."""
    places = shard_of_each(servers.urls)
    last_held = places.index(0, places.index(1))
    async with RedisRegistry(servers.urls, "n", limits=LIMITS) as registry:
        await registered(registry)
        await registry.withdraw("a", "life-1", KEYS[last_held + 1 :])
        servers.kill_shard(1)

        hits = await registry.lookup(KEYS)

    assert hits == PrefixHits(by_worker={"a": last_held + 1}, unknown=True)


async def test_writes_to_a_dead_shard_are_dropped_and_counted(servers: EmbeddedValkey) -> None:
    failures: list[ShardFailure] = []
    async with RedisRegistry(servers.urls, "n", limits=LIMITS, on_failure=failures.append) as registry:
        servers.kill_shard(1)

        await registered(registry)
        await registry.withdraw("a", "life-1", KEYS)
        await registry.unregister("a", "life-1")

    lost = dict.fromkeys(("register", "publish", "withdraw", "unregister"), 0)
    for failure in failures:
        lost[failure.operation] += failure.num_commands
    num_keys = len(keys_on(servers.urls, 1))
    assert lost == {"register": 2, "publish": num_keys, "withdraw": num_keys, "unregister": 1}


async def test_without_any_shard_nothing_is_known(servers: EmbeddedValkey) -> None:
    """Rule 5."""
    async with RedisRegistry(servers.urls, "n", limits=LIMITS) as registry:
        await registered(registry)
        servers.kill_shard(0)
        servers.kill_shard(1)

        assert await registry.lookup(KEYS) == PrefixHits(by_worker={}, unknown=True)
        await registry.publish("a", "life-1", KEYS)
        await registry.unregister("a", "life-1")
        with pytest.raises(RegistryError):
            await registry.workers()
        with pytest.raises(RegistryError):
            await registry.register(WORKER, lease_s=60)


async def test_a_shard_that_comes_back_empty_heals(servers: EmbeddedValkey) -> None:
    async with RedisRegistry(servers.urls, "n", limits=LIMITS) as registry:
        await registered(registry)
        servers.kill_shard(1)
        await registry.lookup(KEYS)
        servers.restart_shard(1)

        async def answers() -> bool:
            return not (await registry.lookup(KEYS)).unknown

        await until(answers)
        assert await registry.workers() == [WORKER]
        await registered(registry)
        assert await registry.lookup(KEYS) == PrefixHits(by_worker={"a": len(KEYS)}, unknown=False)


async def test_all_shards_come_back_empty_and_workers_fill_them_again(servers: EmbeddedValkey) -> None:
    async with RedisRegistry(servers.urls, "n", limits=LIMITS) as registry:
        await registered(registry)
        await registry.workers()
        for index in range(2):
            servers.kill_shard(index)
            servers.restart_shard(index)

        async def register_again() -> bool:
            try:
                await registered(registry)
            except RegistryError:
                return False
            return (await registry.lookup(KEYS)).by_worker == {"a": len(KEYS)}

        await until(register_again)


async def test_a_forgotten_table_is_noticed_at_once(servers: EmbeddedValkey) -> None:
    async with RedisRegistry(servers.urls, "n", limits=LIMITS) as registry:
        await registered(registry)
        assert await registry.workers() == [WORKER]

        for url in servers.urls:
            with redis.Redis.from_url(url) as client:
                client.flushall()

        assert await registry.workers() == []


async def test_a_frozen_shard_costs_one_timeout_not_one_per_lookup(servers: EmbeddedValkey) -> None:
    limits = ShardLimits(timeout_s=1.0, cooldown_s=60.0)
    async with RedisRegistry(servers.urls, "n", limits=limits) as registry:
        await registered(registry)
        os.kill(servers.process_ids[1], signal.SIGSTOP)
        try:
            await registry.lookup(KEYS)
            started_s = time.monotonic()
            hits = [await registry.lookup(KEYS) for _ in range(20)]
            elapsed_s = time.monotonic() - started_s
        finally:
            os.kill(servers.process_ids[1], signal.SIGCONT)

    assert all(hit.unknown and hit.by_worker for hit in hits)
    assert elapsed_s < 20 * 1.0 / 4


async def test_a_full_shard_refuses_to_publish_and_keeps_what_it_has(servers: EmbeddedValkey) -> None:
    """Rule 7."""
    failures: list[ShardFailure] = []
    async with RedisRegistry(servers.urls[:1], "n", limits=LIMITS, on_failure=failures.append) as registry:
        await registry.register(WORKER, lease_s=60)
        await registry.publish("a", "life-1", KEYS[:32])
        with redis.Redis.from_url(servers.urls[0]) as client:
            bound = client.config_get("maxmemory")["maxmemory"]
            client.config_set("maxmemory", 1)
            try:
                await registry.publish("a", "life-1", KEYS[32:])
                await registry.withdraw("a", "life-1", KEYS[30:])
                hits = await registry.lookup(KEYS)
            finally:
                client.config_set("maxmemory", bound)

    assert [(failure.operation, failure.reason, failure.num_commands) for failure in failures] == [
        ("publish", "refused", 32)
    ]
    assert hits == PrefixHits(by_worker={"a": 30}, unknown=False)


async def test_a_full_shard_keeps_leases_and_batch_numbers_and_is_cleaned_up(servers: EmbeddedValkey) -> None:
    """Rules 5 and 7: only claims are refused; a worker that could not renew would vanish and resend for ever."""
    await full_shard_serves_on(servers.urls[0])


async def test_a_full_redis_7_keeps_leases_too(tmp_path: Path) -> None:
    """The flag that lets a script run on a full server is as old as Redis 7.0."""
    server = make_server(tmp_path, free_port())
    server.start()
    try:
        await full_shard_serves_on(f"redis://127.0.0.1:{server.port}/0")
    finally:
        server.kill()


async def full_shard_serves_on(url: str) -> None:
    claimant = Claimant(worker_id="a", incarnation="life-1")
    with redis.Redis.from_url(url) as client:
        async with RedisRegistry([url], "n", limits=LIMITS) as registry:
            (shard,) = await registry.register(WORKER, lease_s=60)
            await registry.publish("a", "life-1", KEYS[:32])
            await registry.publish("ghost", "life-1", KEYS[:32])
            bound = client.config_get("maxmemory")["maxmemory"]
            client.config_set("maxmemory", 1)
            try:
                client.script_flush()
                newcomer = await registry.register(replace(WORKER, worker_id="b"), lease_s=60)
                renewed = await registry.register(WORKER, lease_s=60)
                await registry.write(shard, claimant, dict.fromkeys(KEYS[30:], "device"), 7)
                after = await registry.write(shard, claimant, dict.fromkeys(KEYS[31:32]), 8)
                await registry.tend()
                claims = sum(client.hlen(name) for name in client.keys("kvferry/n/b/*"))
                hits = await registry.lookup(KEYS)
                await registry.unregister("b", "life-1")
                left = await registry.workers()
            finally:
                client.config_set("maxmemory", bound)

    assert (newcomer[shard].is_new, renewed[shard].is_new) == (True, False)
    assert after is not None
    assert after.sequence == 7
    assert hits == PrefixHits(by_worker={"a": 31}, unknown=False)
    assert claims == 31
    assert left == [WORKER]


async def test_dead_claims_on_a_popular_block_are_swept(servers: EmbeddedValkey) -> None:
    """Rule 7."""
    dying = RedisRegistry(servers.urls[:1], "n", limits=LIMITS, entry_ttl_s=0.05)
    living = RedisRegistry(servers.urls[:1], "n", limits=LIMITS)
    async with dying, living:
        await living.publish("b", "life-1", KEYS[:1])
        await dying.publish("a", "life-1", KEYS[:1])
        await asyncio.sleep(0.06)
        await living.publish("b", "life-1", KEYS[:1])

    with redis.Redis.from_url(servers.urls[0]) as client:
        assert client.hkeys(b"kvferry/n/b/" + KEYS[0]) == [b"b"]


async def test_the_last_claim_on_a_block_ends_by_itself(servers: EmbeddedValkey) -> None:
    """Rule 7."""
    async with RedisRegistry(servers.urls[:1], "n", limits=LIMITS, entry_ttl_s=0.05) as registry:
        await registry.publish("a", "life-1", KEYS)

    with redis.Redis.from_url(servers.urls[0]) as client:

        async def is_empty() -> bool:
            return not client.keys()

        await until(is_empty)


async def test_many_lookups_at_once_share_few_connections(servers: EmbeddedValkey) -> None:
    limits = ShardLimits(timeout_s=10.0, max_connections=2)
    async with RedisRegistry(servers.urls, "n", limits=limits) as registry:
        await registered(registry)

        hits = await asyncio.gather(*(registry.lookup(KEYS) for _ in range(50)))

    assert all(hit.by_worker == {"a": len(KEYS)} for hit in hits)


async def test_a_cancelled_lookup_leaves_the_registry_usable(servers: EmbeddedValkey) -> None:
    async with RedisRegistry(servers.urls, "n", limits=LIMITS) as registry:
        await registered(registry)
        for _ in range(20):
            task = asyncio.create_task(registry.lookup(KEYS))
            for _ in range(3):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])

        assert await registry.lookup(KEYS) == PrefixHits(by_worker={"a": len(KEYS)}, unknown=False)


def calls_of(url: str, command: str) -> int:
    with redis.Redis.from_url(url) as client:
        stats: dict[str, dict[str, int]] = client.info("commandstats")
    return stats.get(f"cmdstat_{command}", {}).get("calls", 0)


async def test_a_cold_prompt_asks_for_its_first_batch_only(servers: EmbeddedValkey) -> None:
    """Rule 8."""
    keys = [BlockKey(sha256(f"cold {index}".encode()).digest()) for index in range(3000)]
    async with RedisRegistry(servers.urls, "n", limits=LIMITS) as registry:
        await registry.register(WORKER, lease_s=60)
        await registry.workers()
        before = sum(calls_of(url, "hgetall") for url in servers.urls)

        hits = await registry.lookup(keys)

        assert hits.by_worker == {}
        assert sum(calls_of(url, "hgetall") for url in servers.urls) - before == 32


async def test_a_prompt_of_100k_tokens_is_found_whole(servers: EmbeddedValkey) -> None:
    keys = [BlockKey(sha256(f"long {index}".encode()).digest()) for index in range(3125)]
    async with RedisRegistry(servers.urls, "n", limits=ShardLimits(timeout_s=10.0)) as registry:
        await registry.register(WORKER, lease_s=60)
        await registry.publish("a", "life-1", keys)

        assert await registry.lookup(keys) == PrefixHits(by_worker={"a": 3125}, unknown=False)
