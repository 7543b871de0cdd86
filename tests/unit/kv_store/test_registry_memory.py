from kv_store.registry.memory import MemoryRegistry
from kv_store.registry.protocol import WorkerRecord
from messages.handoff import BlockKey

KEYS = [BlockKey(bytes([index]) * 32) for index in range(3)]


def worker(incarnation: str = "life-1") -> WorkerRecord:
    return WorkerRecord(
        worker_id="a",
        incarnation=incarnation,
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


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_a_lease_ends_at_its_very_end() -> None:
    clock = Clock()
    registry = MemoryRegistry(clock)
    await registry.register(worker(), lease_s=10)

    clock.now_s = 9.999
    assert await registry.workers() == [worker()]

    clock.now_s = 10.0
    assert await registry.workers() == []


async def test_a_worker_that_was_paused_past_its_lease_gets_its_blocks_back() -> None:
    clock = Clock()
    registry = MemoryRegistry(clock)
    await registry.register(worker(), lease_s=10)
    await registry.publish("a", "life-1", KEYS)
    clock.now_s = 20.0

    await registry.register(worker(), lease_s=10)

    assert (await registry.lookup(KEYS)).by_worker == {"a": 3}


async def test_a_lapsed_life_fences_nobody() -> None:
    clock = Clock()
    registry = MemoryRegistry(clock)
    await registry.register(worker("life-1"), lease_s=10)
    await registry.register(worker("life-2"), lease_s=10)
    clock.now_s = 10.0

    await registry.register(worker("life-1"), lease_s=10)

    assert await registry.workers() == [worker("life-1")]


async def test_blocks_of_ended_lives_are_not_kept() -> None:
    registry = MemoryRegistry(Clock())
    for incarnation in ("life-1", "life-2", "life-3"):
        await registry.register(worker(incarnation), lease_s=10)
        await registry.publish("a", incarnation, KEYS)

    await registry.unregister("a", "life-3")

    assert registry._holders == {}


async def test_closing_keeps_the_data_for_others_in_the_process() -> None:
    registry = MemoryRegistry(Clock())
    async with registry:
        await registry.register(worker(), lease_s=10)

    assert await registry.workers() == [worker()]
