"""A Redis Cluster that loses a master, moves slots, and is reached through any node."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import redis
from redis.crc import key_slot

from deployments.worker.membership import Membership, MembershipTimes
from kv_store.local_cache import CacheChanges
from kv_store.registry.cluster import SlotPlacement, SlotRange, home_of_slot, part_ids, read_slots
from kv_store.registry.protocol import Claimant, PrefixHits
from kv_store.registry.redis import RedisRegistry
from kv_store.registry.shard import ShardFailure, ShardLimits
from messages.errors import ConfigError, RegistryError
from tests.contract.registry_places import block_keys, worker
from tests.contract.registry_servers import (
    Cluster,
    RedisServer,
    dump_shard,
    restore_shard,
    running_cluster,
    running_replica,
)

pytestmark = pytest.mark.redis

LIMITS = ShardLimits(timeout_s=2.0, cooldown_s=0.1)
KEYS = block_keys(90)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(running: Cluster) -> Cluster:
    for server in running.servers:
        with server.client() as client, suppress(redis.RedisError):
            client.flushall()
    return running


def shard_of(cluster: Cluster, key: bytes) -> int:
    return min(2, key_slot(b"kvferry/n/b/" + key) // 5461)


def calls_of(server: RedisServer, command: str) -> int:
    with server.client() as client:
        return int(client.info("commandstats").get(f"cmdstat_{command}", {}).get("calls", 0))


async def filled(registry: RedisRegistry) -> None:
    await registry.register(worker("a"), lease_s=60)
    await registry.publish("a", "life-1", KEYS)


async def test_any_node_leads_to_all_and_every_master_has_a_copy_of_the_worker_table(cluster: Cluster) -> None:
    """Rule 8: keys spread by their own content; no shared prefix pulls them onto one master."""
    for url in cluster.urls:
        async with RedisRegistry([url], "n", limits=LIMITS, is_cluster=True) as registry:
            await filled(registry)
            assert await registry.lookup(KEYS) == PrefixHits(by_worker={"a": len(KEYS)}, unknown=False)

    for server in cluster.servers:
        with server.client() as client:
            names = client.keys("*")
            assert sum(name.startswith(b"kvferry/n/w{") for name in names) == 1
            assert sum(name.startswith(b"kvferry/n/b/") for name in names) > len(KEYS) / 6


async def test_a_lookup_is_one_pipeline_per_master(cluster: Cluster) -> None:
    """Rule 8: case 46. Nothing is redirected, so nothing is asked twice."""
    async with RedisRegistry(cluster.urls, "n", limits=LIMITS, is_cluster=True) as registry:
        await filled(registry)
        await registry.workers()
        before = sum(calls_of(server, "hgetall") for server in cluster.servers)

        await registry.lookup(KEYS[:32])

        assert sum(calls_of(server, "hgetall") for server in cluster.servers) - before == 32


async def test_slots_that_have_moved_are_found(cluster: Cluster) -> None:
    async with RedisRegistry(cluster.urls, "n", limits=LIMITS, is_cluster=True) as registry:
        await filled(registry)
        key = next(key for key in KEYS if shard_of(cluster, key) == 0)
        slot = key_slot(b"kvferry/n/b/" + key)
        cluster.move_slot(slot, 0, 1, is_finished=True)
        try:
            hits = await registry.lookup(KEYS)
            await registry.withdraw("a", "life-1", [key])
            gone = await registry.lookup([key])
        finally:
            cluster.move_slot(slot, 1, 0, is_finished=True)

    assert hits == PrefixHits(by_worker={"a": len(KEYS)}, unknown=False)
    assert gone == PrefixHits(by_worker={}, unknown=False)


async def test_a_slot_that_is_on_its_way_answers_from_both_ends(cluster: Cluster) -> None:
    async with RedisRegistry(cluster.urls, "n", limits=LIMITS, is_cluster=True) as registry:
        await filled(registry)
        key = next(key for key in KEYS if shard_of(cluster, key) == 0)
        slot = key_slot(b"kvferry/n/b/" + key)
        cluster.move_slot(slot, 0, 1, is_finished=False)
        try:
            hits = await registry.lookup(KEYS)
        finally:
            cluster.move_slot(slot, 0, 1, is_finished=True)
            cluster.move_slot(slot, 1, 0, is_finished=True)

    assert hits == PrefixHits(by_worker={"a": len(KEYS)}, unknown=False)


async def test_a_batch_of_which_a_part_was_redirected_to_a_silent_master_has_not_arrived(cluster: Cluster) -> None:
    """Rule 11: it is not taken for delivered, though the shard that it was meant for has answered."""
    limits = ShardLimits(timeout_s=0.3, cooldown_s=0.05)
    claimant = Claimant(worker_id="a", incarnation="life-1")
    keys = [key for key in KEYS if shard_of(cluster, key) == 0]
    moved = key_slot(b"kvferry/n/b/" + keys[-1])
    batch = dict.fromkeys(keys, "device")
    async with RedisRegistry(cluster.urls, "n", limits=limits, is_cluster=True) as registry:
        await registry.register(worker("a"), lease_s=60)
        shard = next(shard for shard, of_shard in (await registry.spread(keys)).items() if keys[-1] in of_shard)
        cluster.move_slot(moved, 0, 1, is_finished=True)
        try:
            os.kill(cluster.servers[1].pid, signal.SIGSTOP)
            try:
                lost = await registry.write(shard, claimant, batch, 1)
                with cluster.servers[0].client() as client:
                    mark = client.hget(client.keys("kvferry/n/m*")[0], "a")
            finally:
                os.kill(cluster.servers[1].pid, signal.SIGCONT)
        finally:
            cluster.move_slot(moved, 1, 0, is_finished=True)

    assert b"|1|" in mark
    assert lost is None


async def test_slots_that_another_master_takes_over_empty_are_filled_again(tmp_path: Path) -> None:
    """Rule 9: their master is lost with its data, and for a while nobody serves them."""
    with running_cluster(tmp_path) as cluster:
        async with RedisRegistry(cluster.urls, "n", limits=LIMITS, is_cluster=True) as registry:
            membership = Membership(registry, worker("a"), MembershipTimes(lease_s=0.9))
            tasks = [asyncio.create_task(work) for work in (membership.renew(), membership.publish())]
            membership.note(CacheChanges(stored=KEYS, removed=[]))
            await until_held(registry, len(KEYS))
            with cluster.servers[1].client() as client:
                lost_id = client.execute_command("CLUSTER MYID")
            cluster.servers[1].kill()
            for server in (cluster.servers[0], cluster.servers[2]):
                with server.client() as client:
                    client.execute_command("CLUSTER FORGET", lost_id)
            covered = len([key for key in KEYS if shard_of(cluster, key) != 1])
            give_up_s = time.monotonic() + 15
            while sum(map(len, (await registry.spread(KEYS)).values())) > covered:
                assert time.monotonic() < give_up_s
                await asyncio.sleep(0.05)

            with cluster.servers[0].client() as client:
                client.execute_command("CLUSTER ADDSLOTSRANGE", 5461, 10922)
            await until_held(registry, len(KEYS))

            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_dead_master_is_unknown_not_a_miss_and_comes_back(tmp_path: Path) -> None:
    """Rule 9."""
    failures: list[ShardFailure] = []
    with running_cluster(tmp_path) as cluster:
        async with RedisRegistry(
            cluster.urls, "n", limits=LIMITS, is_cluster=True, on_failure=failures.append
        ) as registry:
            await filled(registry)
            cluster.servers[1].kill()
            try:
                hits = [await registry.lookup(KEYS) for _ in range(10)]
                workers = await registry.workers()
                num_silent = registry.num_silent
            finally:
                cluster.servers[1].start()
                cluster.wait_until_ok()
            alive = [position for position, key in enumerate(KEYS) if shard_of(cluster, key) != 1]

            assert all(hit == PrefixHits(by_worker={"a": max(alive) + 1}, unknown=True) for hit in hits)
            assert workers == [worker("a")]
            assert num_silent == 1
            assert {failure.shard for failure in failures} == {f"127.0.0.1:{cluster.servers[1].port}/0"}
            give_up_s = time.monotonic() + 15
            while (await registry.lookup(KEYS)).unknown and time.monotonic() < give_up_s:  # noqa: ASYNC110 - polls a server
                await asyncio.sleep(0.05)
            await filled(registry)
            assert await registry.lookup(KEYS) == PrefixHits(by_worker={"a": len(KEYS)}, unknown=False)
            assert registry.num_silent == 0


async def test_a_replica_that_was_behind_takes_over_and_is_told_what_it_missed(tmp_path: Path) -> None:
    """Rules 9 and 11: the promoted replica remembers an older batch under the same epoch, so the gap shows."""
    with running_cluster(tmp_path) as cluster, running_replica(tmp_path, cluster.servers[0]) as replica:
        async with RedisRegistry(cluster.urls, "n", limits=LIMITS, is_cluster=True) as registry:
            membership = Membership(registry, worker("a"), MembershipTimes(lease_s=0.9))
            tasks = [asyncio.create_task(work) for work in (membership.renew(), membership.publish())]
            membership.note(CacheChanges(stored=KEYS[:45], removed=[]))
            await until_held(registry, 45)
            with cluster.servers[0].client() as client:
                behind = dump_shard(client)
            membership.note(CacheChanges(stored=KEYS[45:], removed=[]))
            await until_held(registry, len(KEYS))
            cluster.servers[0].kill()
            with replica.client() as client:
                client.execute_command("CLUSTER FAILOVER", "TAKEOVER")
                restore_shard(client, behind)
            await until_held(registry, len(KEYS))

            assert membership.counts.gaps >= 1
            assert membership.counts.epoch_changes == 0
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def until_held(registry: RedisRegistry, num_blocks: int) -> None:
    give_up_s = time.monotonic() + 20
    hits = PrefixHits()
    while time.monotonic() < give_up_s:
        hits = await registry.lookup(KEYS)
        if hits == PrefixHits(by_worker={"a": num_blocks}, unknown=False):
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"{num_blocks} blocks are not held: {hits}")


async def test_without_any_node_nothing_is_known(tmp_path: Path) -> None:
    """Rule 5."""
    failures: list[ShardFailure] = []
    async with RedisRegistry(
        ["redis://127.0.0.1:1"], "n", limits=LIMITS, is_cluster=True, on_failure=failures.append
    ) as registry:
        assert await registry.lookup(KEYS) == PrefixHits(by_worker={}, unknown=True)
        await registry.publish("a", "life-1", KEYS)
        assert registry.num_silent == 1
        with pytest.raises(RegistryError):
            await registry.workers()
        with pytest.raises(RegistryError):
            await registry.register(worker("a"), lease_s=60)

    assert ("publish", "uncovered", len(KEYS)) in [
        (failure.operation, failure.reason, failure.num_commands) for failure in failures
    ]


@pytest.mark.parametrize("urls", [[], ["redis://a:1/2"], ["unix:///run/redis.sock"]])
def test_an_address_that_no_cluster_has_is_a_config_error(urls: list[str]) -> None:
    with pytest.raises(ConfigError):
        RedisRegistry(urls, "n", is_cluster=True)


@pytest.mark.parametrize("slot", [0, 1, 5461, 16383])
def test_the_home_of_a_slot_lies_in_it(slot: int) -> None:
    assert key_slot(b"kvferry/n/w" + home_of_slot(slot)) == slot


def test_nodes_that_do_not_know_their_host_are_where_they_were_asked() -> None:
    reply = [[0, 99, [b"", 7000, b"id"], [b"10.0.0.2", 7001, b"id"]], [100, 200, [None, 7002, b"id"]]]

    assert read_slots(reply, "10.0.0.1") == [
        SlotRange(first=0, last=99, master=("10.0.0.1", 7000), replicas=(("10.0.0.2", 7001),)),
        SlotRange(first=100, last=200, master=("10.0.0.1", 7002)),
    ]


def test_a_part_keeps_its_name_while_slots_move_and_when_a_replica_takes_it_over() -> None:
    """Rule 9: only what may have lost its data looks like a new shard to those who fill it."""
    a, b, c, replica = (("10.0.0.1", 7000 + number) for number in range(4))
    first = part_ids({a: 0, b: 8000}, {}, 0)
    moved = part_ids({a: 100, b: 0, c: 8000}, first, 0)
    failed_over = part_ids({replica: 0, b: 8000}, first, 0)
    repaired = part_ids({a: 0, b: 8000}, {}, 1)

    assert (moved[a], moved[b]) == (first[a], first[b])
    assert moved[c] not in first.values()
    assert failed_over == {replica: first[a], b: first[b]}
    assert not set(repaired.values()) & set(first.values())


def test_keys_of_slots_that_nobody_serves_are_left_out() -> None:
    master = ("10.0.0.1", 7000)
    everything = SlotPlacement([SlotRange(first=0, last=16383, master=master)], [master], bytes)
    half = SlotPlacement([SlotRange(first=0, last=8191, master=master)], [master], bytes)

    assert everything.split(KEYS) == {0: list(range(len(KEYS)))}
    assert half.split(KEYS) == {0: [position for position, key in enumerate(KEYS) if key_slot(key) < 8192]}
