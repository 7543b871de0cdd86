"""What a worker says follows its blocks when the shards behind a registry change."""

from collections.abc import Mapping, Sequence

from kv_store.registry.memory import SHARD, MemoryRegistry
from kv_store.registry.protocol import Claimant, ShardMemory, Tier
from kv_store.registry.publisher import BlockPublisher, PublishLimits
from messages.handoff import BlockKey
from tests.contract.registry_places import worker

KEYS = [BlockKey(bytes([number]) * 32) for number in range(20)]


class Parts(MemoryRegistry):
    """Shards that come and go; a key lies where its first byte says, on the next one when that is gone."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.parts = {name: MemoryRegistry() for name in names}
        self.num_spread = 0

    async def shards(self) -> tuple[str, ...]:
        return tuple(self.parts)

    async def spread(self, keys: Sequence[BlockKey]) -> dict[str, list[BlockKey]]:
        self.num_spread += 1
        names = list(self.parts)
        spread: dict[str, list[BlockKey]] = {}
        for key in keys:
            spread.setdefault(names[key[0] % len(names)], []).append(key)
        return spread

    async def write(
        self, shard: str, claimant: Claimant, changes: Mapping[BlockKey, Tier | None], sequence: int
    ) -> ShardMemory | None:
        return await self.parts[shard].write(SHARD, claimant, changes, sequence)

    async def num_held(self) -> int:
        """Blocks that are found on the shards where they belong now."""
        held = 0
        for name, keys in (await self.spread(KEYS)).items():
            await self.parts[name].register(worker("a"), lease_s=60)
            held += sum([bool((await self.parts[name].lookup([key])).by_worker) for key in keys])
        return held


async def flush(publisher: BlockPublisher) -> None:
    for _ in range(20):
        await publisher.flush()


async def published(registry: Parts) -> BlockPublisher:
    publisher = BlockPublisher(registry, Claimant(worker_id="a", incarnation="life-1"))
    publisher.note(KEYS, ())
    await flush(publisher)
    assert await registry.num_held() == len(KEYS)
    return publisher


async def test_a_shard_that_takes_over_from_one_that_is_gone_hears_what_that_one_knew() -> None:
    """Rule 9: it may have taken the part over without the data."""
    registry = Parts("slot-0", "slot-1")
    publisher = await published(registry)
    del registry.parts["slot-1"]

    await flush(publisher)

    assert await registry.num_held() == len(KEYS)
    assert not publisher.has_work


async def test_a_shard_that_goes_before_it_was_filled_again_leaves_no_work_behind() -> None:
    registry = Parts("slot-0", "slot-1")
    publisher = await published(registry)
    memories = {"slot-1": ShardMemory(epoch="another", sequence=0)}
    publisher.check(memories, publisher.expect(), lease_s=60)
    del registry.parts["slot-1"]
    await flush(publisher)
    num_spread = registry.num_spread

    await publisher.flush()

    assert not publisher.has_work
    # Of what is noted now, which is nothing; not of all that is held.
    assert registry.num_spread - num_spread == 1


class Listening(MemoryRegistry):
    """Notes what it hears, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[BlockKey] = []

    async def write(
        self, shard: str, claimant: Claimant, changes: Mapping[BlockKey, Tier | None], sequence: int
    ) -> ShardMemory | None:
        self.heard.extend(() if self.is_silent else changes)
        return await super().write(shard, claimant, changes, sequence)


async def test_what_a_silent_shard_is_to_hear_again_waits_once_however_long_it_is_silent() -> None:
    """A claim is due again and again meanwhile; nothing grows, and it is said once when the shard is back."""
    registry, now_s = Listening(), [0.0]
    claimant, limits = Claimant(worker_id="a", incarnation="life-1"), PublishLimits(resync_batch_size=4)
    publisher = BlockPublisher(registry, claimant, limits, lambda: now_s[0])
    publisher.note(KEYS, ())
    await flush(publisher)
    registry.is_silent = True
    registry.heard.clear()

    for _ in range(5):
        now_s[0] += 60.0
        publisher.refresh(entry_ttl_s=100.0)
        await publisher.flush()

    assert publisher.queue_depth == len(KEYS)
    registry.is_silent = False
    now_s[0] += 1.0
    await flush(publisher)
    assert registry.heard == KEYS


async def test_claims_that_are_due_while_nothing_may_be_said_wait_once() -> None:
    """As long as a generation cannot be registered, nothing is flushed."""
    now_s = [0.0]
    claimant = Claimant(worker_id="a", incarnation="life-1")
    publisher = BlockPublisher(MemoryRegistry(), claimant, clock=lambda: now_s[0])
    publisher.note(KEYS, ())
    await flush(publisher)

    for _ in range(5):
        now_s[0] += 60.0
        publisher.refresh(entry_ttl_s=100.0)

    assert publisher.queue_depth == len(KEYS)
