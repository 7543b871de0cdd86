"""A worker's lease and its blocks, followed by the tasks that the worker runs."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sized
from contextlib import asynccontextmanager
from typing import Any

import pytest

from deployments.worker.membership import Membership, MembershipTimes
from kv_store.local_cache import CacheChanges
from kv_store.registry.memory import MemoryRegistry
from kv_store.registry.protocol import Claimant, ShardMemory, Tier, WorkerRecord
from messages.errors import RegistryError
from messages.handoff import BlockKey
from tests.contract.registry_places import worker

LEASE_S = 0.3
KEYS = [BlockKey(bytes([number]) * 32) for number in range(200)]


def longest(low: float, high: float) -> float:
    assert low < high
    return high


@asynccontextmanager
async def running(membership: Membership) -> Any:
    tasks = [asyncio.create_task(work) for work in (membership.renew(), membership.publish())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def member(registry: MemoryRegistry, jitter: Callable[[float, float], float] = longest) -> Membership:
    return Membership(registry, worker("a"), MembershipTimes(lease_s=LEASE_S), jitter=jitter)


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 5.0) -> float:
    """Wait for it; the seconds that it took."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 - the condition is not an event
            await asyncio.sleep(0.005)
    return loop.time() - started_s


def found(registry: MemoryRegistry, num_blocks: int) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        return (await registry.lookup(KEYS[:num_blocks])).by_worker == {"a": num_blocks}

    return check


async def test_blocks_are_found_soon_and_the_lease_is_kept() -> None:
    """Rule 10."""
    registry = MemoryRegistry()
    membership = member(registry)
    async with running(membership):
        membership.note(CacheChanges(stored=KEYS[:5], removed=[]))
        await until(found(registry, 5))
        for _ in range(10):
            await asyncio.sleep(LEASE_S / 5)

            assert await registry.workers() == [worker("a")]


async def test_a_registry_that_forgot_everything_knows_it_again_within_one_renewal() -> None:
    """Rule 10, case 31."""
    registry = MemoryRegistry()
    membership = member(registry)
    async with running(membership):
        membership.note(CacheChanges(stored=KEYS[:5], removed=[]))
        await until(found(registry, 5))
        registry.forget()

        elapsed_s = await until(found(registry, 5))

    # A third of the lease to notice, and what changes wait for each other; the rest is this machine's.
    assert elapsed_s < LEASE_S / 3 + 0.05 + 0.5
    assert (membership.counts.epoch_changes, membership.counts.resyncs) == (1, 1)


async def test_a_silent_registry_loses_nothing_that_it_is_told_later() -> None:
    """Rule 5."""
    registry = MemoryRegistry()
    membership = member(registry)
    async with running(membership):
        registry.is_silent = True
        membership.note(CacheChanges(stored=KEYS[:5], removed=[]))
        await asyncio.sleep(LEASE_S)
        assert membership.queue_depth == 5
        registry.is_silent = False

        await until(found(registry, 5))

    assert membership.queue_depth == 0


async def test_a_clear_is_registered_at_once() -> None:
    """Rule 11: nobody waits for the next renewal, and no block is withdrawn by itself."""
    registry = MemoryRegistry()
    membership = Membership(registry, worker("a"), MembershipTimes(lease_s=600.0))
    async with running(membership):
        membership.note(CacheChanges(stored=KEYS, removed=[]))
        await until(found(registry, len(KEYS)))
        membership.note(CacheChanges(stored=[], removed=KEYS))

        async def is_gone() -> bool:
            return (await registry.lookup(KEYS)).by_worker == {}

        await until(is_gone)
        assert await registry.workers() == [membership_record(membership)]
    assert membership.generation == 1
    assert membership.queue_depth == 0


class Refuses(MemoryRegistry):
    """Refuses to register generations, and notes in turn what was registered and what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.num_to_refuse = 0
        self.said: list[str] = []

    async def register(self, record: WorkerRecord, *, lease_s: float) -> dict[str, ShardMemory]:
        if self.num_to_refuse:
            self.num_to_refuse -= 1
            self.said.append("refused")
            raise RegistryError("no shard took the registration")
        self.said.append(f"registered {record.generation}")
        return await super().register(record, lease_s=lease_s)

    async def write(
        self, shard: str, claimant: Claimant, changes: Mapping[BlockKey, Tier | None], sequence: int
    ) -> ShardMemory | None:
        self.said.append(f"written {claimant.generation}")
        return await super().write(shard, claimant, changes, sequence)


async def test_a_generation_is_registered_before_it_claims_and_soon_after_a_failure() -> None:
    """Rule 11: claims of a generation that no table lists are taken for a dead one's."""
    registry = Refuses()
    membership = Membership(registry, worker("a"), MembershipTimes(lease_s=600.0))
    async with running(membership):
        membership.note(CacheChanges(stored=KEYS, removed=[]))
        await until(found(registry, len(KEYS)))
        registry.said.clear()
        registry.num_to_refuse = 2
        membership.note(CacheChanges(stored=[], removed=KEYS[5:]))

        await until(lambda: _has(registry.said, 4))

        assert await found(registry, 5)()
    assert registry.said == ["refused", "refused", "registered 1", "written 1"]


def membership_record(membership: Membership) -> WorkerRecord:
    record = worker("a")
    return WorkerRecord.from_json(record.to_json().replace('"generation":0', f'"generation":{membership.generation}'))


async def test_two_hits_in_a_row_are_no_clear() -> None:
    """Case 69."""
    membership = member(MemoryRegistry())

    membership.note(CacheChanges(stored=[], removed=[]))
    membership.note(CacheChanges(stored=[], removed=[]))

    assert (membership.generation, membership.queue_depth) == (0, 0)


class Polled(MemoryRegistry):
    """Counts how often it is asked for its shards, which every flush begins with."""

    num_asked = 0

    async def shards(self) -> tuple[str, ...]:
        self.num_asked += 1
        return await super().shards()


async def test_what_a_silent_shard_does_not_take_is_not_tried_all_the_time() -> None:
    registry = Polled()
    membership = Membership(registry, worker("a"), MembershipTimes(lease_s=600.0))
    async with running(membership):
        membership.note(CacheChanges(stored=KEYS[:5], removed=[]))
        await until(found(registry, 5))
        registry.is_silent = True
        membership.note(CacheChanges(stored=KEYS[5:10], removed=[]))
        await asyncio.sleep(0.2)
        before = registry.num_asked
        await asyncio.sleep(1.2)

        assert 1 <= registry.num_asked - before <= 3
        registry.is_silent = False
        assert await until(found(registry, 10)) < 1.0


class Times(MemoryRegistry):
    """Notes when it is registered at."""

    def __init__(self) -> None:
        super().__init__()
        self.at_s: list[float] = []

    async def register(self, record: WorkerRecord, *, lease_s: float) -> dict[str, ShardMemory]:
        self.at_s.append(asyncio.get_running_loop().time())
        return await super().register(record, lease_s=lease_s)


async def test_every_renewal_is_jittered_the_first_one_most() -> None:
    """Rule 10: workers that start together drift apart before their first renewal."""
    asked: list[tuple[float, float]] = []

    def lowest(low: float, high: float) -> float:
        asked.append((low, high))
        return low

    registry = Times()
    async with running(member(registry, lowest)):
        await until(lambda: _has(registry.at_s, 3))

    assert asked[0] == (0.2, 1.0)
    assert set(asked[1:]) == {(0.8, 1.0)}
    gaps = [later - earlier for earlier, later in zip(registry.at_s, registry.at_s[1:], strict=False)]
    assert gaps[0] == pytest.approx(LEASE_S / 3 * 0.2, abs=0.05)
    assert gaps[1] == pytest.approx(LEASE_S / 3 * 0.8, abs=0.05)


async def _has(noted: Sized, count: int) -> bool:
    return len(noted) >= count


async def test_leaving_takes_the_worker_out_for_good() -> None:
    """A worker that drains goes on publishing and must not be listed again by its next renewal."""
    registry = MemoryRegistry()
    membership = member(registry)
    async with running(membership):
        await until(lambda: _is_listed(registry))

        await membership.leave()
        await asyncio.sleep(2 * LEASE_S / 3)

        assert await registry.workers() == []


async def _is_listed(registry: MemoryRegistry) -> bool:
    return bool(await registry.workers())
