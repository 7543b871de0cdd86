"""What every registry promises to the owners of blocks: numbered batches, epochs and generations."""

from dataclasses import replace

from kv_store.registry.protocol import Claimant, PrefixHits
from messages.handoff import BlockKey
from tests.contract.registry_places import Place, block_keys, worker


async def write(place: Place, claimant: Claimant, keys: list[BlockKey], sequence: int) -> list[int]:
    """Write to every shard that keeps any of `keys`; what each remembered before."""
    remembered = []
    for shard, of_shard in (await place.registry.spread(keys)).items():
        memory = await place.registry.write(shard, claimant, dict.fromkeys(of_shard, "device"), sequence)
        assert memory is not None
        remembered.append(memory.sequence)
    return remembered


async def test_numbered_writes_are_seen_and_remembered(place: Place) -> None:
    """Rule 11: a batch tells which one its shard has taken before, so a gap shows."""
    keys, claimant = block_keys(200), Claimant(worker_id="a", incarnation="life-1")
    await place.registry.register(worker("a"), lease_s=60)

    first = await write(place, claimant, keys, 1)
    second = await write(place, claimant, keys[:100], 7)
    memories = await place.second_view.register(worker("a"), lease_s=60)

    assert set(first) == {0}
    assert set(second) == {1}
    assert {memory.sequence for memory in memories.values()} == {7}
    assert not any(memory.is_new for memory in memories.values())
    assert (await place.second_view.lookup(keys)).by_worker == {"a": 200}


async def test_a_batch_may_take_and_give_up(place: Place) -> None:
    keys, claimant = block_keys(8), Claimant(worker_id="a", incarnation="life-1")
    await place.registry.register(worker("a"), lease_s=60)
    await write(place, claimant, keys, 1)

    for shard, of_shard in (await place.registry.spread(keys[4:])).items():
        await place.registry.write(shard, claimant, dict.fromkeys(of_shard), 2)

    assert (await place.second_view.lookup(keys)).by_worker == {"a": 4}


async def test_an_epoch_stays_and_is_the_same_for_all(place: Place) -> None:
    """Rule 10."""
    first = await place.registry.register(worker("a"), lease_s=60)
    second = await place.second_view.register(worker("b"), lease_s=60)

    assert {shard: memory.epoch for shard, memory in first.items()} == {
        shard: memory.epoch for shard, memory in second.items()
    }
    assert all(memory.epoch for memory in first.values())


async def test_a_new_life_begins_at_batch_0(place: Place) -> None:
    """Case 59: a worker that starts again counts from the beginning, and is heard."""
    keys = block_keys(20)
    await place.registry.register(worker("a", "life-1"), lease_s=60)
    await write(place, Claimant(worker_id="a", incarnation="life-1"), keys, 40)
    memories = await place.registry.register(worker("a", "life-2"), lease_s=60)

    before = await write(place, Claimant(worker_id="a", incarnation="life-2"), keys, 1)

    assert all(memory.is_new and memory.sequence == 0 for memory in memories.values())
    assert set(before) == {0}
    assert (await place.second_view.lookup(keys)).by_worker == {"a": 20}


async def test_a_registration_says_whether_the_life_was_listed(place: Place) -> None:
    first = await place.registry.register(worker("a"), lease_s=0.05)
    again = await place.registry.register(worker("a"), lease_s=0.05)
    for _ in range(6):
        await place.let_time_pass()
    late = await place.registry.register(worker("a"), lease_s=60)

    assert [all(memory.is_new for memory in answer.values()) for answer in (first, late)] == [True, True]
    assert not any(memory.is_new for memory in again.values())


async def test_a_new_generation_takes_all_older_claims_away_at_once(place: Place) -> None:
    """Rule 11: a clear is one step, not one per block."""
    keys = block_keys(300)
    await place.registry.register(worker("a"), lease_s=60)
    await place.registry.publish("a", "life-1", keys)
    assert (await place.second_view.lookup(keys)).by_worker == {"a": 300}

    await place.registry.register(replace(worker("a"), generation=1), lease_s=60)

    assert (await place.second_view.lookup(keys)).by_worker == {}
    await place.registry.publish("a", "life-1", keys[:2], generation=1)
    assert (await place.second_view.lookup(keys)).by_worker == {"a": 2}
    await place.registry.publish("a", "life-1", keys[:1])
    assert (await place.second_view.lookup(keys)).by_worker == {}


async def test_a_late_registration_of_an_older_generation_only_renews(place: Place) -> None:
    """Rule 11: claims that were taken away do not come back, and those of the present generation stay."""
    keys, present = block_keys(20), replace(worker("a"), generation=3)
    await place.registry.register(present, lease_s=60)
    await place.registry.publish("a", "life-1", keys, generation=3)

    late = await place.registry.register(replace(worker("a"), generation=2), lease_s=60)

    assert not any(memory.is_new for memory in late.values())
    assert await place.second_view.workers() == [present]
    assert (await place.second_view.lookup(keys)).by_worker == {"a": 20}
    await place.registry.register(replace(worker("a"), generation=4), lease_s=60)
    assert await place.second_view.workers() == [replace(worker("a"), generation=4)]


async def test_spread_gives_every_key_one_shard(place: Place) -> None:
    keys = block_keys(100)

    spread = await place.registry.spread(keys)

    assert sorted(key for of_shard in spread.values() for key in of_shard) == sorted(keys)
    assert set(spread) <= set(await place.registry.shards())
    assert spread == await place.second_view.spread(keys)


async def test_two_hits_in_a_row_change_nothing(place: Place) -> None:
    """Case 69: a lookup only reads."""
    keys = block_keys(40)
    await place.registry.register(worker("a"), lease_s=60)
    before = await write(place, Claimant(worker_id="a", incarnation="life-1"), keys, 1)

    hits = [await place.second_view.lookup(keys) for _ in range(2)]

    assert hits == [PrefixHits(by_worker={"a": 40}), PrefixHits(by_worker={"a": 40})]
    memories = await place.registry.register(worker("a"), lease_s=60)
    assert {memory.sequence for memory in memories.values()} <= {0, 1}
    assert set(before) == {0}
    assert await place.second_view.workers() == [worker("a")]
