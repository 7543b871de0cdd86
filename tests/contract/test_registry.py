"""One promise, every registry: memory, one and four Valkey shards, a Redis Cluster, and Redis behind TLS and AUTH.

Every command over the cluster passes its slot check, so the suite also shows that no script touches two slots: rule 8,
case 46.
"""

import random
import time
from dataclasses import replace

import pytest

from kv_store.registry.memory import MemoryRegistry
from kv_store.registry.protocol import PrefixHits, Registry, WorkerRecord
from messages.errors import RegistryError
from messages.handoff import BlockKey
from tests.contract.registry_places import REDIS_KINDS, Place, block_keys, make_redis, namespaces, worker


async def test_nobody_is_there_at_first(place: Place) -> None:
    assert await place.registry.workers() == []
    assert await place.registry.lookup(block_keys(3)) == PrefixHits()
    assert await place.registry.lookup([]) == PrefixHits()


async def test_workers_come_back_as_they_registered_in_order_of_id(place: Place) -> None:
    await place.registry.register(worker("b"), lease_s=60)
    await place.registry.register(worker("a"), lease_s=60)

    assert await place.second_view.workers() == [worker("a"), worker("b")]


async def test_a_worker_that_registers_changed_is_seen_changed(place: Place) -> None:
    await place.registry.register(worker("a"), lease_s=60)
    await place.second_view.workers()
    drained = replace(worker("a"), role="decode")

    await place.registry.register(drained, lease_s=60)

    assert await place.second_view.workers() == [drained]


async def test_lookup_gives_the_longest_prefix_of_each_worker(place: Place) -> None:
    keys = block_keys(10)
    for worker_id, held in (("a", keys), ("b", keys[:4]), ("c", keys[1:]), ("d", [])):
        await place.registry.register(worker(worker_id), lease_s=60)
        await place.registry.publish(worker_id, "life-1", held)

    hits = await place.second_view.lookup(keys)

    assert hits == PrefixHits(by_worker={"a": 10, "b": 4}, unknown=False)


@pytest.mark.parametrize("num_held", [31, 32, 33, 95, 96, 97, 700])
async def test_lookup_is_right_at_the_edges_of_its_batches(place: Place, num_held: int) -> None:
    """Rule 8."""
    keys = block_keys(700)
    await place.registry.register(worker("a"), lease_s=60)
    await place.registry.publish("a", "life-1", keys[:num_held])

    hits = await place.registry.lookup(keys)

    assert hits.by_worker == {"a": num_held}


async def test_publishing_twice_is_publishing_once(place: Place) -> None:
    keys = block_keys(2)
    await place.registry.register(worker("a"), lease_s=60)
    await place.registry.publish("a", "life-1", keys)
    await place.registry.publish("a", "life-1", keys, tier="host")

    await place.registry.withdraw("a", "life-1", keys)

    assert (await place.registry.lookup(keys)).by_worker == {}


async def test_withdrawing_a_middle_block_shortens_the_hit(place: Place) -> None:
    keys = block_keys(5)
    await place.registry.register(worker("a"), lease_s=60)
    await place.registry.publish("a", "life-1", keys)

    await place.registry.withdraw("a", "life-1", [keys[2]])

    assert (await place.second_view.lookup(keys)).by_worker == {"a": 2}


async def test_withdraw_skips_a_missing_block_and_deletes_the_rest(place: Place) -> None:
    """Case 58."""
    first, missing, last = block_keys(3)
    await place.registry.register(worker("a"), lease_s=60)
    await place.registry.publish("a", "life-1", [first, last])

    await place.registry.withdraw("a", "life-1", [first, missing, last])

    assert (await place.registry.lookup([first])).by_worker == {}
    assert (await place.registry.lookup([last])).by_worker == {}


async def test_withdraw_leaves_the_blocks_of_other_workers(place: Place) -> None:
    keys = block_keys(2)
    for worker_id in ("a", "b"):
        await place.registry.register(worker(worker_id), lease_s=60)
        await place.registry.publish(worker_id, "life-1", keys)

    await place.registry.withdraw("a", "life-1", keys)

    assert (await place.registry.lookup(keys)).by_worker == {"b": 2}


async def test_a_restarted_worker_holds_nothing_at_once(place: Place) -> None:
    """Rule 6, case 29."""
    keys = block_keys(50)
    await place.registry.register(worker("a", "life-1"), lease_s=60)
    await place.registry.publish("a", "life-1", keys)
    assert (await place.second_view.lookup(keys)).by_worker == {"a": 50}

    await place.registry.register(worker("a", "life-2"), lease_s=60)

    assert (await place.second_view.lookup(keys)).by_worker == {}
    assert await place.second_view.workers() == [worker("a", "life-2")]


async def test_a_late_withdraw_of_an_earlier_life_deletes_nothing(place: Place) -> None:
    keys = block_keys(3)
    await place.registry.register(worker("a", "life-2"), lease_s=60)
    await place.registry.publish("a", "life-2", keys)

    await place.registry.withdraw("a", "life-1", keys)

    assert (await place.registry.lookup(keys)).by_worker == {"a": 3}


async def test_unregister_of_an_earlier_life_leaves_the_present_one(place: Place) -> None:
    await place.registry.register(worker("a", "life-1"), lease_s=60)
    await place.registry.register(worker("a", "life-2"), lease_s=60)

    await place.registry.unregister("a", "life-1")

    assert await place.registry.workers() == [worker("a", "life-2")]


async def test_a_replaced_life_cannot_come_back_while_the_new_one_lives(place: Place) -> None:
    """Rules 6 and 10."""
    await place.registry.register(worker("a", "life-1"), lease_s=60)
    await place.registry.register(worker("a", "life-2"), lease_s=60)

    with pytest.raises(RegistryError):
        await place.registry.register(worker("a", "life-1"), lease_s=60)

    assert await place.registry.workers() == [worker("a", "life-2")]


async def test_an_unregistered_worker_is_gone_at_once(place: Place) -> None:
    keys = block_keys(2)
    await place.registry.register(worker("a"), lease_s=60)
    await place.registry.publish("a", "life-1", keys)
    assert await place.second_view.workers() == [worker("a")]

    await place.registry.unregister("a", "life-1")

    assert await place.second_view.workers() == []
    assert (await place.second_view.lookup(keys)).by_worker == {}


async def test_a_worker_whose_lease_runs_out_is_gone(place: Place) -> None:
    """Rule 10."""
    keys = block_keys(2)
    await place.registry.register(worker("a"), lease_s=0.2)
    await place.registry.register(worker("b"), lease_s=60)
    await place.registry.publish("a", "life-1", keys)

    give_up_s = time.monotonic() + 10
    while len(await place.second_view.workers()) == 2 and time.monotonic() < give_up_s:
        await place.let_time_pass()

    assert await place.second_view.workers() == [worker("b")]
    assert (await place.second_view.lookup(keys)).by_worker == {}


async def test_a_worker_that_renews_stays_and_keeps_its_blocks(place: Place) -> None:
    keys = block_keys(2)
    await place.registry.register(worker("a"), lease_s=0.3)
    await place.registry.publish("a", "life-1", keys)
    await place.second_view.lookup(keys)  # A view that now knows the short lease.

    await place.registry.register(worker("a"), lease_s=60)
    for _ in range(16):
        await place.let_time_pass()

    assert (await place.second_view.lookup(keys)).by_worker == {"a": 2}


async def test_a_life_that_nobody_registered_is_not_counted(place: Place) -> None:
    """Rule 6."""
    keys = block_keys(2)
    await place.registry.publish("ghost", "life-1", keys)

    assert (await place.registry.lookup(keys)).by_worker == {}


async def test_two_namespaces_do_not_see_each_other(place: Place) -> None:
    keys = block_keys(2)
    await place.registry.register(worker("a"), lease_s=60)
    await place.registry.publish("a", "life-1", keys)

    assert await place.elsewhere.workers() == []
    assert (await place.elsewhere.lookup(keys)).by_worker == {}

    await place.elsewhere.register(worker("a"), lease_s=60)
    assert (await place.elsewhere.lookup(keys)).by_worker == {}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", REDIS_KINDS)
async def test_memory_and_redis_agree_on_a_random_life(request: pytest.FixtureRequest, kind: str, seed: int) -> None:
    dice = random.Random(seed)  # noqa: S311 - a reproducible story, not a secret
    keys = block_keys(6)
    memory = MemoryRegistry()
    latest_life = {"a": 1, "b": 1}  # One that has ended never registers again.
    async with make_redis(request, kind, next(namespaces)) as redis:
        for _ in range(150):
            act = dice.choice(["register", "register", "unregister", "publish", "publish", "publish", "withdraw"])
            worker_id = dice.choice("ab")
            life = latest_life[worker_id]
            if worker(worker_id, f"life-{life}") in await memory.workers():
                life -= dice.choice([0, 0, 0, 1])  # Something late from the life before.
            some_keys = keys[: dice.randint(1, 6)] if act == "publish" else dice.sample(keys, 2)
            outcomes = [
                await outcome_of(registry, act, worker(worker_id, f"life-{life}"), some_keys)
                for registry in (memory, redis)
            ]
            if (act == "unregister" and life == latest_life[worker_id]) or dice.random() < 0.1:
                latest_life[worker_id] += 1

            assert outcomes[0] == outcomes[1]


async def outcome_of(
    registry: Registry, act: str, record: WorkerRecord, keys: list[BlockKey]
) -> tuple[bool, list[WorkerRecord], PrefixHits]:
    is_refused = False
    if act == "register":
        try:
            await registry.register(record, lease_s=60)
        except RegistryError:
            is_refused = True
    elif act == "unregister":
        await registry.unregister(record.worker_id, record.incarnation)
    elif act == "publish":
        await registry.publish(record.worker_id, record.incarnation, keys)
    else:
        await registry.withdraw(record.worker_id, record.incarnation, keys)
    return is_refused, await registry.workers(), await registry.lookup(block_keys(6))
