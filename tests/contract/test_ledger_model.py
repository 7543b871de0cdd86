"""No order of events between gateways, workers and the ledger loses a reservation or counts one twice: rule 16."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.contract.ledger_machine import LedgerMachine
from tests.contract.ledger_places import Clock, memory_place, redis_place

REDIS_KINDS = [pytest.param(kind, marks=pytest.mark.redis) for kind in ("one shard", "four shards", "cluster")]


def test_no_order_of_events_breaks_the_ledger_of_one_process() -> None:
    def make_machine() -> LedgerMachine:
        clock = Clock()
        return LedgerMachine(lambda: memory_place(clock), clock)

    run_state_machine_as_test(make_machine, settings=settings(max_examples=100, stateful_step_count=40, deadline=None))


@pytest.mark.parametrize("kind", REDIS_KINDS)
def test_no_order_of_events_breaks_the_shared_ledger(request: pytest.FixtureRequest, kind: str) -> None:
    run_state_machine_as_test(
        lambda: LedgerMachine(lambda: redis_place(request, kind), None),
        settings=settings(max_examples=20, stateful_step_count=40, deadline=None),
    )
