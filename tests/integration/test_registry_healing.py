"""Real shards that forget, die and fill up, and the workers that make them whole again."""

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256

import pytest
import redis

from deployments.worker.membership import Membership, MembershipTimes
from kv_store.embedded import EmbeddedValkey
from kv_store.local_cache import CacheChanges
from kv_store.registry.census import ShardCensus, take_census
from kv_store.registry.footprint import measure_bytes_per_block
from kv_store.registry.redis import RedisRegistry
from kv_store.registry.shard import ShardLimits
from messages.errors import RegistryError
from messages.handoff import BlockKey
from tests.contract.registry_places import block_keys, worker
from tests.contract.registry_servers import dump_shard, restore_shard

pytestmark = pytest.mark.redis

LIMITS = ShardLimits(timeout_s=5.0, cooldown_s=0.1)
LEASE_S = 0.9
RENEW_S = LEASE_S / 3
SLACK_S = 1.0
"""For this machine; what is measured is a fraction of it when nothing else runs."""


@pytest.fixture(scope="module")
def running_servers() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey(num_shards=2) as servers:
        yield servers


@pytest.fixture
def servers(running_servers: EmbeddedValkey) -> EmbeddedValkey:
    for url in running_servers.urls:
        with redis.Redis.from_url(url) as client:
            client.flushall()
    return running_servers


def open_registry(servers: EmbeddedValkey) -> RedisRegistry:
    return RedisRegistry(servers.urls, "n", limits=LIMITS)


@asynccontextmanager
async def member(servers: EmbeddedValkey, worker_id: str) -> AsyncIterator[Membership]:
    """A worker that registers, renews and publishes until the context is left, without a goodbye."""
    async with open_registry(servers) as registry:
        membership = Membership(registry, worker(worker_id), MembershipTimes(lease_s=LEASE_S))
        tasks = [asyncio.create_task(work) for work in (membership.renew(), membership.publish())]
        try:
            yield membership
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 20.0) -> float:
    """Wait for it; the seconds that it took."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 - the condition is in another process
            await asyncio.sleep(0.01)
    return loop.time() - started_s


def holds(registry: RedisRegistry, keys: list[BlockKey], *worker_ids: str) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        return (await registry.lookup(keys)).by_worker == dict.fromkeys(worker_ids, len(keys))

    return check


def num_claims(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        return sum(client.hlen(name) for name in client.scan_iter("kvferry/n/b/*", count=1000))


async def test_flushed_shards_are_whole_again_within_one_renewal_under_load(servers: EmbeddedValkey) -> None:
    """Case 31, rule 10: no request fails meanwhile."""
    keys = block_keys(600)
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(open_registry(servers))
        members = [await stack.enter_async_context(member(servers, name)) for name in ("a", "b", "c")]
        for one in members:
            one.note(CacheChanges(stored=keys, removed=[]))
        await until(holds(router, keys, "a", "b", "c"))
        lookups = asyncio.create_task(look_up_for_ever(router, keys))
        stack.callback(lookups.cancel)

        for url in servers.urls:
            with redis.Redis.from_url(url) as client:
                client.flushall()
        elapsed_s = await until(holds(router, keys, "a", "b", "c"))

        assert not lookups.done()
        assert elapsed_s < RENEW_S + SLACK_S
        assert all(one.counts.resyncs >= 1 for one in members)


async def look_up_for_ever(registry: RedisRegistry, keys: list[BlockKey]) -> None:
    """Ends only when a lookup raises."""
    while True:
        await registry.lookup(keys)
        await asyncio.sleep(0.002)


async def test_a_shard_that_restarts_empty_is_filled_by_all_and_the_rest_serves_on(servers: EmbeddedValkey) -> None:
    """Rules 5, 9 and 10."""
    keys = block_keys(300)
    async with open_registry(servers) as router, member(servers, "a") as one:
        one.note(CacheChanges(stored=keys, removed=[]))
        await until(holds(router, keys, "a"))
        servers.kill_shard(0)
        one.note(CacheChanges(stored=block_keys(40, "later"), removed=keys[200:]))

        during = await router.lookup(keys)
        workers = await router.workers()
        servers.restart_shard(0)
        await until(holds(router, block_keys(40, "later"), "a"))
        await until(holds(router, keys[:200], "a"))

        assert during.unknown
        assert during.by_worker["a"] > 150
        assert workers == [worker("a")]
        assert (await router.lookup(keys)).by_worker == {"a": 200}
        assert one.counts.epoch_changes == 1


async def test_with_every_shard_dead_nothing_raises_and_all_heals(servers: EmbeddedValkey) -> None:
    """Rule 5."""
    keys = block_keys(100)
    async with open_registry(servers) as router, member(servers, "a") as one:
        one.note(CacheChanges(stored=keys[:50], removed=[]))
        await until(holds(router, keys[:50], "a"))
        for index in range(2):
            servers.kill_shard(index)

        blind = await router.lookup(keys)
        one.note(CacheChanges(stored=keys[50:], removed=[]))
        with pytest.raises(RegistryError):
            await router.workers()
        num_silent = router.num_silent
        for index in range(2):
            servers.restart_shard(index)
        await until(holds(router, keys, "a"))

        assert (blind.by_worker, blind.unknown, num_silent) == ({}, True, 2)
        assert router.num_silent == 0


async def test_writes_that_a_shard_lost_are_noticed_and_said_again(servers: EmbeddedValkey) -> None:
    """Rule 11: as after the failover to a replica that was behind."""
    keys = block_keys(100)
    async with open_registry(servers) as router, member(servers, "a") as one:
        one.note(CacheChanges(stored=keys[:50], removed=[]))
        await until(holds(router, keys[:50], "a"))
        saved = []
        for url in servers.urls:
            with redis.Redis.from_url(url) as client:
                saved.append(dump_shard(client))
        one.note(CacheChanges(stored=keys[50:], removed=[]))
        await until(holds(router, keys, "a"))

        for url, state in zip(servers.urls, saved, strict=True):
            with redis.Redis.from_url(url) as client:
                restore_shard(client, state)
        await until(holds(router, keys, "a"))

        assert one.counts.gaps >= 1
        assert one.counts.epoch_changes == 0


_DOOMED = """
import asyncio, sys
from kv_store.registry.redis import RedisRegistry
from tests.contract.registry_places import block_keys, worker

async def main():
    registry = RedisRegistry(sys.argv[1:], "n")
    await registry.register(worker("doomed"), lease_s={lease_s})
    await registry.publish("doomed", "life-1", block_keys(100))
    print("up", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_claims_of_a_killed_worker_are_ignored_after_its_lease_and_then_dropped(servers: EmbeddedValkey) -> None:
    """Case 28, rule 7: long before their time to live of hours is over; the living keep theirs."""
    keys = block_keys(100)
    doomed = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _DOOMED.format(lease_s=LEASE_S), *servers.urls, stdout=subprocess.PIPE
    )
    assert doomed.stdout is not None
    assert await doomed.stdout.readline() == b"up\n"
    doomed.kill()
    await doomed.wait()
    async with open_registry(servers) as router, open_registry(servers) as other, member(servers, "b") as living:
        living.note(CacheChanges(stored=block_keys(30, "b"), removed=[]))
        await until(holds(router, keys))
        ignored_at = sum(map(num_claims, servers.urls))
        await until(holds(router, block_keys(30, "b"), "b"))

        async def is_swept() -> bool:
            # Two who tend: only one leads on a shard.
            await asyncio.gather(router.tend(), other.tend())
            return sum(map(num_claims, servers.urls)) == 30

        await until(is_swept)

        assert ignored_at >= 100
        assert await holds(router, block_keys(30, "b"), "b")()


async def test_one_tick_of_the_clean_up_is_bounded(servers: EmbeddedValkey) -> None:
    """Rule 7: a full pass at once would stall a shard."""
    keys = [BlockKey(sha256(b"%d" % number).digest()) for number in range(6000)]
    async with RedisRegistry(servers.urls[:1], "n", limits=LIMITS) as registry:
        await registry.publish("ghost", "life-1", keys)
        scans_before, keys_before = (calls_of(servers.urls[0], command) for command in ("scan", "keys"))

        await registry.tend()
        after_one = num_claims(servers.urls[0])
        num_scans = calls_of(servers.urls[0], "scan") - scans_before
        await until_swept(registry, servers.urls[0])

    assert 6000 - 2 * 1024 <= after_one < 6000
    assert num_scans <= 1024 // 256 + 24  # num_claims scans too.
    assert calls_of(servers.urls[0], "keys") == keys_before


async def until_swept(registry: RedisRegistry, url: str) -> None:
    async def is_empty() -> bool:
        await registry.tend()
        return num_claims(url) == 0

    await until(is_empty)


def calls_of(url: str, command: str) -> int:
    with redis.Redis.from_url(url) as client:
        stats: dict[str, dict[str, int]] = client.info("commandstats")
    return stats.get(f"cmdstat_{command}", {}).get("calls", 0)


async def test_a_claim_that_was_renewed_meanwhile_is_not_dropped(servers: EmbeddedValkey) -> None:
    """Rule 7: a worker that was away comes back while its claims are cleaned up."""
    keys = block_keys(50)
    async with open_registry(servers) as registry, open_registry(servers) as tender:
        await registry.publish("a", "life-1", keys)

        await registry.register(worker("a"), lease_s=60)
        await tender.tend()

        assert (await registry.lookup(keys)).by_worker == {"a": 50}


async def test_a_shard_that_may_evict_gets_one_clear_warning(
    servers: EmbeddedValkey, caplog: pytest.LogCaptureFixture
) -> None:
    """Rule 7: claims and leases must not be lost one without the other."""
    caplog.set_level(logging.INFO)
    with redis.Redis.from_url(servers.urls[0]) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            async with open_registry(servers) as one, open_registry(servers) as other:
                for _ in range(3):
                    await one.tend()
                    await other.tend()
        finally:
            client.config_set("maxmemory-policy", "noeviction")

    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert servers.urls[0].removeprefix("redis://") in warnings[0]
    assert "allkeys-lru" in warnings[0]
    assert "set maxmemory-policy to noeviction" in warnings[0]


async def test_a_shard_that_may_not_say_its_policy_is_not_warned_of(
    servers: EmbeddedValkey, caplog: pytest.LogCaptureFixture
) -> None:
    with redis.Redis.from_url(servers.urls[0]) as client:
        client.execute_command("ACL", "SETUSER", "shy", "on", ">word", "~*", "+@all", "-info", "-config")
        address = servers.urls[0].removeprefix("redis://")
        async with RedisRegistry([f"redis://shy:word@{address}"], "n", limits=LIMITS) as registry:
            await registry.publish("ghost", "life-1", block_keys(3))
            await until_swept(registry, servers.urls[0])

        client.execute_command("ACL", "DELUSER", "shy")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_census_counts_claims_by_worker_tier_and_shard(servers: EmbeddedValkey) -> None:
    keys = block_keys(90)
    async with open_registry(servers) as registry:
        for name in ("a", "b"):
            await registry.register(worker(name), lease_s=60)
        await registry.publish("a", "life-1", keys)
        await registry.publish("b", "life-1", keys[:30], tier="host")
        await registry.publish("ghost", "life-1", keys[:10])
        spread = {shard: len(of_shard) for shard, of_shard in (await registry.spread(keys)).items()}

        censuses = await take_census(registry, max_blocks=10_000, on_progress=lambda shard, count: None)
        servers.kill_shard(1)
        with_one_dead = await take_census(registry, max_blocks=10_000, on_progress=lambda shard, count: None)
        servers.restart_shard(1)

    found = [census for census in censuses if isinstance(census, ShardCensus)]
    assert {census.shard: census.num_blocks for census in found} == spread
    assert {census.shard: census.claims["a", "device"] for census in found} == spread
    assert sum(census.claims["b", "host"] for census in found) == 30
    assert sum(census.num_dead_claims for census in found) == 10
    assert all(census.is_whole and census.memory is not None and not census.memory.may_evict for census in found)
    assert [isinstance(census, ShardCensus) for census in with_one_dead] == [True, False]


async def test_the_memory_of_a_block_is_measured_and_given_back(servers: EmbeddedValkey) -> None:
    async with open_registry(servers) as registry:
        size_bytes = await measure_bytes_per_block(registry, [worker("prefill-0"), worker("decode-0")], 20_000)

    # The key alone has 32 bytes, its claim some 40; a hash table's share comes on top.
    assert 100 < size_bytes < 600
    assert sum(map(num_claims, servers.urls)) == 0
