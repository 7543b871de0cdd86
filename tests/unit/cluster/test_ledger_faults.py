"""Rule 26: a fault per command of the ledger."""

import inspect
import time

import pytest

from cluster.degrading_ledger import DegradingLedger
from cluster.ledger import Ledger
from cluster.ledger_faults import with_faults
from cluster.memory_ledger import MemoryLedger
from messages.errors import RegistryError
from messages.fault_plan import FAULT_POINTS, parse_faults
from messages.faults import NO_FAULTS, Faults
from tests.contract.ledger_places import POOL, candidate, reserve_on


def faulty(plan: str) -> tuple[MemoryLedger, Ledger]:
    inner = MemoryLedger()
    return inner, with_faults(inner, Faults(parse_faults(plan)))


def test_every_command_of_a_ledger_has_a_point() -> None:
    commands = {
        name
        for name, member in vars(Ledger).items()
        if inspect.iscoroutinefunction(member) and not name.startswith("_") and name != "close"
    }

    assert {f"ledger.{name}" for name in commands} == {name for name in FAULT_POINTS if name.startswith("ledger.")}


def test_without_a_plan_for_it_the_ledger_is_the_same_object() -> None:
    ledger = MemoryLedger()

    assert with_faults(ledger, NO_FAULTS) is ledger
    assert with_faults(ledger, Faults(parse_faults("registry.lookup:error"))) is ledger


async def test_an_error_leaves_the_command_undone() -> None:
    inner, ledger = faulty("ledger.reserve:error*1,ledger.release:error*1,ledger.forget:error,ledger.pending:error")
    with pytest.raises(RegistryError, match="a fault was asked for"):
        await reserve_on(ledger, "r", [candidate("a")])
    assert await inner.pending(POOL) == []

    await reserve_on(ledger, "r", [candidate("a")])
    for ask in (
        lambda: ledger.release(POOL, "r"),
        lambda: ledger.forget(POOL, "a", "life-1"),
        lambda: ledger.pending(POOL),
    ):
        with pytest.raises(RegistryError):
            await ask()

    assert inner.num_open == 1
    assert await ledger.release(POOL, "r") is True


async def test_a_dropped_answer_leaves_the_command_done() -> None:
    inner, ledger = faulty("ledger.reserve:drop,ledger.release:drop")

    with pytest.raises(RegistryError):
        await reserve_on(ledger, "r", [candidate("a")])
    assert [row.nonce for row in await inner.pending(POOL)] == ["r"]

    with pytest.raises(RegistryError):
        await ledger.release(POOL, "r")
    assert inner.num_released == 1


async def test_a_delayed_command_is_done_later() -> None:
    inner, ledger = faulty("ledger.reserve:delay=0.05")
    started_s = time.monotonic()

    async with ledger as same:
        await reserve_on(same, "r", [candidate("a")])

    assert time.monotonic() - started_s >= 0.05
    assert inner.num_open == ledger.num_open == 1


async def test_a_gateway_goes_on_with_its_own_view_whatever_is_planned() -> None:
    """Window W0: a shard dies, or its answer is lost."""
    inner, shared = faulty("ledger.reserve:drop*1,ledger.reserve:error*1+1,ledger.release:error*1")
    async with DegradingLedger(shared) as ledger:
        for number in range(6):
            await reserve_on(ledger, f"r/{number}", [candidate("a"), candidate("b")])

        assert sorted(row.nonce for row in await ledger.pending(POOL)) == [f"r/{number}" for number in range(6)]
        assert ledger.is_degraded
    assert [row.nonce for row in await inner.pending(POOL)] == ["r/0"], "until it is asked to take it back"
