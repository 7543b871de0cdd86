import inspect
import time

import pytest

from kv_store.registry.memory import SHARD, MemoryRegistry
from kv_store.registry.protocol import Claimant, Registry, WorkerRecord
from kv_store.registry_faults import with_faults
from messages.errors import RegistryError
from messages.fault_plan import FAULT_POINTS, parse_faults
from messages.faults import NO_FAULTS, Faults
from messages.handoff import BlockKey

KEYS = [BlockKey(bytes([number] * 32)) for number in range(3)]


def record(worker_id: str = "w") -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        incarnation="1",
        address="127.0.0.1:1",
        pool="prefill",
        role="prefill",
        model="m",
        fingerprint="f",
        block_size=16,
        key_model="m",
        key_codec="c",
        context_length=100,
    )


def faulty(plan: str) -> tuple[MemoryRegistry, Registry]:
    inner = MemoryRegistry()
    return inner, with_faults(inner, Faults(parse_faults(plan)))


def test_every_command_of_a_registry_has_a_point() -> None:
    """Rule 26: a fault per registry command."""
    commands = {
        name
        for name, member in vars(Registry).items()
        if inspect.iscoroutinefunction(member)
        and not name.startswith("_")
        # Nothing is sent for shards and spread; workers publish and withdraw by write.
        and name not in ("close", "shards", "spread", "publish", "withdraw")
    }

    assert {f"registry.{name}" for name in commands} == {name for name in FAULT_POINTS if name.startswith("registry.")}


def test_without_a_plan_for_it_the_registry_is_the_same_object() -> None:
    registry = MemoryRegistry()

    assert with_faults(registry, NO_FAULTS) is registry
    assert with_faults(registry, Faults(parse_faults("clock:skew=1"))) is registry


async def test_an_error_leaves_the_command_undone() -> None:
    inner, registry = faulty("registry.register:error*1,registry.write:error*1,registry.lookup:error+1")

    with pytest.raises(RegistryError, match="a fault was asked for"):
        await registry.register(record(), lease_s=5.0)
    assert await inner.workers() == []
    await registry.register(record(), lease_s=5.0)

    claimant, batch = Claimant(worker_id="w", incarnation="1"), dict.fromkeys(KEYS, "device")
    assert await registry.write(SHARD, claimant, batch, 1) is None
    assert not (await inner.lookup(KEYS)).by_worker
    assert await registry.write(SHARD, claimant, batch, 2) is not None

    assert (await registry.lookup(KEYS)).by_worker == {"w": 3}
    assert (await registry.lookup(KEYS)).unknown


async def test_a_dropped_answer_leaves_the_command_done() -> None:
    inner, registry = faulty("registry.register:drop,registry.workers:drop")

    with pytest.raises(RegistryError):
        await registry.register(record(), lease_s=5.0)
    with pytest.raises(RegistryError):
        await registry.workers()

    assert [entry.worker_id for entry in await inner.workers()] == ["w"]


async def test_a_delayed_command_is_done_later() -> None:
    inner, registry = faulty("registry.register:delay=0.05")
    started_s = time.monotonic()

    async with registry as same:
        await same.register(record(), lease_s=5.0)

    assert time.monotonic() - started_s >= 0.05
    assert [entry.worker_id for entry in await inner.workers()] == ["w"]
