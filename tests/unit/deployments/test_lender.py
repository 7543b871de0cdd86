import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

from deployments.worker import lender as lender_module
from deployments.worker.lender import Lender
from engine.events import Lent
from kv_store.handoff import HandoffTable
from messages.handoff import BlockId, BlockKey, BlockRef
from messages.requests import RequestId
from telemetry.metrics import WorkerCounter

KEYS = (BlockKey(b"k" * 32),)


class Engine:
    """Remembers what it was asked; the test answers."""

    def __init__(self) -> None:
        self.asked: list[RequestId] = []
        self.ended: list[RequestId] = []

    def lend(self, lend_id: RequestId, keys: Sequence[BlockKey], first_block: int) -> None:
        self.asked.append(lend_id)

    def abort(self, request_id: RequestId) -> None:
        self.ended.append(request_id)


class Place:
    def __init__(self, max_lends: int = 2) -> None:
        self.engine = Engine()
        self.table = HandoffTable(worker_id="w", incarnation="i", address="a:1", fingerprint="f", lease_s=5.0)
        self.counts: Counter[WorkerCounter] = Counter()
        self.now_s = 0.0
        self.lender = Lender(self.engine, self.table, max_lends, lambda: self.now_s, self._count)

    def _count(self, counter: WorkerCounter) -> None:
        self.counts[counter] += 1

    async def asked(self) -> "asyncio.Task[object]":
        before = len(self.engine.asked)
        task = asyncio.create_task(self.lender.lend(KEYS, 0))
        await asyncio.sleep(0)
        assert len(self.engine.asked) == before + 1
        return task

    def answer(self, num_tokens: int = 8) -> None:
        groups = ((BlockRef(block_id=BlockId(3), key=KEYS[0]),),) if num_tokens else ()
        self.lender.take(Lent(request_id=self.engine.asked[-1], num_tokens=num_tokens, groups=groups))

    def end_all(self) -> None:
        for request_id in self.table.pop_freed():
            self.lender.note_end(request_id)


async def test_what_the_engine_lends_is_offered_under_a_lease() -> None:
    place = Place()
    task = await place.asked()
    place.answer()

    handoff = await task

    assert (handoff.num_tokens, handoff.fingerprint, handoff.lease_s) == (8, "f", 5.0)
    assert (len(place.table), len(place.lender)) == (1, 1)
    assert place.counts == {WorkerCounter.LENDS: 1}
    assert place.table.num_granted == 1


async def test_a_lease_that_ends_makes_room_for_another_lend() -> None:
    place = Place(max_lends=1)
    task = await place.asked()
    place.answer()
    await task
    assert await place.lender.lend(KEYS, 0) is None

    place.table.expire(6.0)
    place.end_all()

    assert len(place.lender) == 0
    await place.asked()


async def test_lends_that_are_not_answered_yet_count_too() -> None:
    place = Place(max_lends=1)
    await place.asked()

    assert await place.lender.lend(KEYS, 0) is None
    assert place.counts == {WorkerCounter.LENDS_REFUSED: 1}


async def test_nothing_is_offered_when_nothing_is_cached() -> None:
    place = Place()
    task = await place.asked()
    place.answer(num_tokens=0)

    assert await task is None
    assert (len(place.table), len(place.lender)) == (0, 0)


async def test_a_borrower_that_gives_up_leaves_no_lend_behind() -> None:
    place = Place()
    task = await place.asked()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    place.answer()

    assert place.engine.ended == place.engine.asked
    assert (len(place.table), len(place.lender)) == (0, 0)


async def test_an_engine_in_a_long_step_lends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lender_module, "ANSWER_TIMEOUT_S", 0.01)
    place = Place()

    assert await place.lender.lend(KEYS, 0) is None
    assert place.engine.ended == place.engine.asked
    assert len(place.lender) == 0
