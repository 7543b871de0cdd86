"""The shared ledger goes away and comes back: window W0, and no reservation stays behind on either side."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Literal

import pytest

from cluster.degrading_ledger import DegradingLedger, LedgerPatience
from cluster.memory_ledger import MemoryLedger
from messages.errors import RegistryError, Unavailable
from messages.reservations import Candidate, Need, Reservation
from tests.contract.ledger_places import NEED, POOL, TTL_S, Clock, candidate, pending_tokens, reserve_on

PAIR = [candidate("a"), candidate("b")]
PATIENCE = LedgerPatience(timeout_s=0.02, first_wait_s=1.0, max_wait_s=5.0)


class BadShared(MemoryLedger):
    """A shared ledger on a line that can be cut, before the words arrive or before the answer comes."""

    def __init__(self) -> None:
        super().__init__(Clock())
        self.cut_pools: set[str] = set()
        self.loses_answers = False
        self.hangs: Literal["asking", "answering"] | None = None
        self.undelivered: list[Callable[[], Awaitable[Reservation]]] = []
        self.is_closed = False
        self.num_asked = 0

    async def reserve(
        self, pool: str, candidates: Sequence[Candidate], need: Need, *, nonce: str, ttl_s: float
    ) -> Reservation:
        words = partial(super().reserve, pool, candidates, need, nonce=nonce, ttl_s=ttl_s)
        if self.hangs == "asking":
            self.undelivered.append(words)
        elif self.hangs == "answering":
            await words()
        await self._pass_line(pool)
        made = await words()
        if self.loses_answers:
            raise RegistryError("the answer is lost")
        return made

    async def release(self, pool: str, nonce: str) -> bool:
        await self._pass_line(pool)
        return await super().release(pool, nonce)

    async def forget(self, pool: str, worker_id: str, incarnation: str) -> int:
        await self._pass_line(pool)
        return await super().forget(pool, worker_id, incarnation)

    async def pending(self, pool: str) -> list[Reservation]:
        await self._pass_line(pool)
        return await super().pending(pool)

    async def close(self) -> None:
        self.is_closed = True

    async def _pass_line(self, pool: str) -> None:
        self.num_asked += 1
        if self.hangs:
            await asyncio.sleep(3600)
        if pool in self.cut_pools:
            raise RegistryError("the line is cut")

    def kept(self, pool: str = POOL) -> list[str]:
        """What its data says, line or not."""
        return [row.nonce for row in self._book(pool).pending(0.0)]


class Sleep:
    """Time passes when a test says so; it remembers the waits."""

    def __init__(self) -> None:
        self.waits_s: list[float] = []
        self._woken = asyncio.Event()

    async def __call__(self, wait_s: float) -> None:
        self.waits_s.append(wait_s)
        await self._woken.wait()
        self._woken.clear()

    async def pass_by(self) -> None:
        """End the wait that is on, and let what follows happen."""
        self._woken.set()
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.fixture
def shared() -> BadShared:
    return BadShared()


@pytest.fixture
def sleep() -> Sleep:
    return Sleep()


@pytest.fixture
async def ledger(shared: BadShared, sleep: Sleep) -> AsyncIterator[DegradingLedger]:
    async with DegradingLedger(
        shared, patience=PATIENCE, clock=Clock(), sleep=sleep, random_share=lambda: 1.0
    ) as ledger:
        yield ledger


async def test_while_the_shared_ledger_answers_everything_is_there(ledger: DegradingLedger, shared: BadShared) -> None:
    await reserve_on(ledger, "r/1", PAIR)
    await reserve_on(ledger, "r/2", PAIR)

    assert shared.kept() == ["r/1", "r/2"]
    assert await ledger.release(POOL, "r/1") is True
    assert await ledger.release(POOL, "r/1") is False
    assert await ledger.forget(POOL, "b", "life-1") == 1
    assert shared.kept() == []
    assert not ledger.is_degraded
    assert (ledger.num_open, ledger.num_released, ledger.num_dropped, ledger.num_expired) == (0, 1, 1, 0)


async def test_a_burst_spreads_evenly_without_the_shared_ledger(ledger: DegradingLedger, shared: BadShared) -> None:
    """Case 61, with Redis gone."""
    shared.cut_pools.add(POOL)
    idle = [candidate(worker_id) for worker_id in "abcd"]
    need = Need(prefill_tokens=32_768, kv_tokens=32_769)

    chosen = await asyncio.gather(*(reserve_on(ledger, f"r/{number}", idle, need) for number in range(8)))

    assert Counter(chosen) == dict.fromkeys("abcd", 2)
    assert ledger.is_degraded
    assert await pending_tokens(ledger) == dict.fromkeys("abcd", 65_536)
    assert shared.kept() == []


async def test_a_degraded_pool_waits_for_nobody(ledger: DegradingLedger, shared: BadShared) -> None:
    shared.cut_pools.add(POOL)
    await reserve_on(ledger, "r/1", PAIR)
    num_asked = shared.num_asked

    await reserve_on(ledger, "r/2", PAIR)
    await ledger.release(POOL, "r/2")
    await ledger.pending(POOL)

    assert shared.num_asked == num_asked


async def test_a_shared_ledger_that_says_nothing_costs_one_deadline(ledger: DegradingLedger, shared: BadShared) -> None:
    shared.hangs = "asking"

    assert await reserve_on(ledger, "r/1", PAIR) == "a"

    assert ledger.is_degraded
    assert shared.num_asked == 1


async def test_pools_on_other_shards_stay_shared(ledger: DegradingLedger, shared: BadShared) -> None:
    shared.cut_pools.add("long")
    await ledger.reserve("long", PAIR, NEED, nonce="l", ttl_s=TTL_S)
    await reserve_on(ledger, "r", PAIR)

    assert ledger.degraded_pools == {"long"}
    assert shared.kept() == ["r"]


async def test_the_shared_ledger_is_asked_again_ever_more_rarely_until_it_answers(
    ledger: DegradingLedger, shared: BadShared, sleep: Sleep
) -> None:
    shared.cut_pools.add(POOL)
    await asyncio.gather(*(reserve_on(ledger, f"r/{number}", PAIR) for number in range(3)))

    for _ in range(5):
        await sleep.pass_by()
    assert sleep.waits_s == [1.0, 2.0, 4.0, 5.0, 5.0, 5.0]
    assert ledger.is_degraded

    shared.cut_pools.clear()
    await sleep.pass_by()
    assert not ledger.is_degraded
    await reserve_on(ledger, "later", PAIR)
    assert shared.kept() == ["later"]


async def test_each_loss_begins_with_a_short_wait(ledger: DegradingLedger, shared: BadShared, sleep: Sleep) -> None:
    for number in range(2):
        shared.cut_pools.add(POOL)
        await reserve_on(ledger, f"r/{number}", PAIR)
        await sleep.pass_by()
        shared.cut_pools.clear()
        await sleep.pass_by()

    assert sleep.waits_s == [1.0, 2.0, 1.0, 2.0]
    assert not ledger.is_degraded


async def test_gateways_do_not_ask_at_the_same_time() -> None:
    waits_s = []
    for share in (0.0, 0.5):
        shared, sleep = BadShared(), Sleep()
        shared.cut_pools.add(POOL)
        async with DegradingLedger(
            shared, patience=PATIENCE, sleep=sleep, random_share=lambda share=share: share
        ) as ledger:
            await reserve_on(ledger, "r", PAIR)
            await sleep.pass_by()
        waits_s.append(sleep.waits_s)

    assert waits_s == [[0.5, 1.0], [0.75, 1.5]]


async def test_what_was_reserved_there_is_released_there_when_it_is_back(
    ledger: DegradingLedger, shared: BadShared, sleep: Sleep
) -> None:
    for number in range(3):
        await reserve_on(ledger, f"r/{number}", PAIR)
    shared.cut_pools.add(POOL)
    assert await ledger.release(POOL, "r/0") is False, "not known yet"
    assert await ledger.release(POOL, "r/1") is False
    assert ledger.is_degraded

    shared.cut_pools.clear()
    await sleep.pass_by()

    assert not ledger.is_degraded
    assert shared.kept() == ["r/2"]
    assert await ledger.release(POOL, "r/2") is True


async def test_a_reservation_whose_answer_was_lost_does_not_stay(
    ledger: DegradingLedger, shared: BadShared, sleep: Sleep
) -> None:
    shared.loses_answers = True
    assert await reserve_on(ledger, "r", PAIR) == "a"
    assert shared.kept() == ["r"]

    await sleep.pass_by()

    assert shared.kept() == []
    assert [row.nonce for row in await ledger.pending(POOL)] == ["r"], "the local one lives"


async def test_what_was_reserved_here_is_released_here_when_the_other_is_back(
    ledger: DegradingLedger, shared: BadShared, sleep: Sleep
) -> None:
    shared.cut_pools.add(POOL)
    made = await ledger.reserve(POOL, PAIR, NEED, nonce="r", ttl_s=TTL_S)
    shared.cut_pools.clear()
    await sleep.pass_by()
    num_asked = shared.num_asked

    again = await ledger.reserve(POOL, PAIR, NEED, nonce="r", ttl_s=TTL_S)
    ended = [await ledger.release(POOL, "r") for _ in range(2)]

    assert again == made
    assert ended == [True, False]
    assert shared.num_asked == num_asked
    assert await ledger.pending(POOL) == []


async def test_the_local_view_numbers_for_itself(ledger: DegradingLedger, shared: BadShared) -> None:
    """Else a worker that has admitted 1 to 9 of the shared ledger's would seem to have admitted the local ones."""
    before = await ledger.reserve(POOL, PAIR[:1], NEED, nonce="r/1", ttl_s=TTL_S)
    shared.cut_pools.add(POOL)

    after = await ledger.reserve(POOL, PAIR[:1], NEED, nonce="r/2", ttl_s=TTL_S)

    assert after.issuer != before.issuer


async def test_no_worker_is_no_reason_to_degrade(ledger: DegradingLedger) -> None:
    with pytest.raises(Unavailable):
        await reserve_on(ledger, "r", [])

    assert not ledger.is_degraded


async def test_a_caller_that_leaves_before_the_answer_has_reserved_nothing(
    ledger: DegradingLedger, shared: BadShared
) -> None:
    """W0: the client cancels."""
    await leave_while_it_hangs(ledger, shared, "answering")

    assert shared.kept() == []
    assert not ledger.is_degraded


async def test_words_that_arrive_after_their_caller_has_left_reserve_nothing(
    ledger: DegradingLedger, shared: BadShared
) -> None:
    await leave_while_it_hangs(ledger, shared, "asking")

    for words in shared.undelivered:
        with pytest.raises(Unavailable):
            await words()

    assert len(shared.undelivered) == 1
    assert shared.kept() == []


async def leave_while_it_hangs(
    ledger: DegradingLedger, shared: BadShared, moment: Literal["asking", "answering"]
) -> None:
    shared.hangs = moment
    asking = asyncio.create_task(reserve_on(ledger, "r", PAIR))
    await asyncio.sleep(0)
    asking.cancel()
    shared.hangs = None
    with pytest.raises(asyncio.CancelledError):
        await asking
    await ledger.close()


async def test_leaving_ends_the_asking_and_closes_the_shared_ledger(shared: BadShared, sleep: Sleep) -> None:
    shared.cut_pools.add(POOL)
    async with DegradingLedger(shared, patience=PATIENCE, sleep=sleep) as ledger:
        await reserve_on(ledger, "r", PAIR)
        await asyncio.sleep(0)
        tasks = [task for task in asyncio.all_tasks() if task.get_name() == f"ledger-return-{POOL}"]

    assert len(tasks) == 1
    assert tasks[0].cancelled()
    assert shared.is_closed
