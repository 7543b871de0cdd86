"""What a borrow adds to the worker's counters when blocks arrive changed, or their owner does not let them be read."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from deployments.worker.borrow import Borrow, BorrowLimits
from engine.events import Borrowing
from kv_store.handoff_reader import HandoffReader, LocalGroups
from messages.errors import HandoffError, LayoutMismatch
from messages.handoff import BlockKey, Handoff
from messages.requests import RequestId
from messages.reuse import PrefixSource, ReuseOffer
from telemetry.metrics import WorkerCounter
from tests.unit.kv_store.handoff_pair import BLOCK_BYTES, REMOTE_OFFSETS, DigestPair, ids, refs

KEYS = tuple(BlockKey(bytes([number]) * 32) for number in range(2))
HANDSHAKES = [counter for counter in WorkerCounter if counter.startswith("handshake_failures_total")]


class Lenders:
    """One other worker, in this process, that lends two blocks of each of its two groups."""

    def __init__(self, pair: DigestPair) -> None:
        self.pair = pair
        self.refusal: HandoffError | None = None
        self.silence_s = 0.0
        """Passes between what it lends and what follows."""
        self.released: list[str] = []

    def owner(self, worker_id: str, incarnation: str, address: str) -> "Lenders":
        return self

    async def lend(self, incarnation: str, keys: Sequence[BlockKey], first_block: int) -> Handoff:
        handoff = self.pair.grant((refs(5, 2), refs(8, 7)), 32)
        self.pair.now_s += self.silence_s
        return handoff

    async def release(self, handoff: Handoff, reason: str) -> None:
        self.released.append(reason)
        await self.pair.owner.release(handoff, reason)

    def make_reader(self, handoff: Handoff, groups: LocalGroups) -> HandoffReader:
        if self.refusal is not None:
            raise self.refusal
        return self.pair.reader(handoff, groups)


class Engine:
    """Remembers how much of the prefix it was given."""

    def __init__(self) -> None:
        self.received = -1

    def receive(self, request_id: RequestId, num_tokens: int) -> None:
        self.received = num_tokens

    def set_aside(self, request_id: RequestId, aside_id: RequestId) -> None:
        raise AssertionError("the owner answers")

    def abort(self, request_id: RequestId) -> None: ...


async def borrowed(lenders: Lenders) -> tuple[int, dict[WorkerCounter, float]]:
    """Tokens that arrived, and what was counted."""
    wanted = Borrowing(request_id=RequestId("r"), cached_tokens=0, keys=KEYS, groups=(ids(1, 0), ids(4, 5)))
    source = PrefixSource(worker_id="p", incarnation="1", address="a", num_blocks=2)
    limits = BorrowLimits(block_size=16, has_windows=False, deadline_s=5.0)
    engine, kept = Engine(), set[asyncio.Task[None]]()

    def keep(work: Coroutine[Any, Any, None]) -> None:
        kept.add(asyncio.create_task(work))

    borrow = Borrow(wanted, ReuseOffer(sources=(source,)), lenders, engine, limits, keep)
    await borrow.run()
    await asyncio.gather(*kept)
    return engine.received, borrow.stats.counters()


async def test_a_whole_borrow_counts_what_moved_and_no_failure() -> None:
    received, counted = await borrowed(Lenders(DigestPair()))

    assert received == 32
    assert counted[WorkerCounter.TRANSFER_BLOCKS] == 4
    assert counted[WorkerCounter.TRANSFER_BYTES] == 2 * sum(BLOCK_BYTES)
    assert not counted[WorkerCounter.REUSE_FAILURES]
    assert not counted[WorkerCounter.DIGEST_MISMATCHES]
    assert not any(counted.get(counter) for counter in HANDSHAKES)


async def test_blocks_that_arrive_with_other_bytes_are_counted() -> None:
    """Rule 26, metric digest_mismatch."""
    pair = DigestPair()
    changed = REMOTE_OFFSETS[0] + 2 * BLOCK_BYTES[0]
    right, digest = int(pair.source[changed]), pair.theirs.digest
    pair.source[changed] ^= 1

    def mended(group: int, block_id: Any) -> int:
        pair.source[changed] = right
        return digest(group, block_id)

    pair.owner._digest = mended

    received, counted = await borrowed(Lenders(pair))

    assert received == 16
    assert counted[WorkerCounter.DIGEST_MISMATCHES] == 1
    assert counted[WorkerCounter.REUSE_FAILURES] == 1


@pytest.mark.parametrize(
    ("refusal", "counter"),
    [
        (LayoutMismatch("the owner lays KV out differently"), WorkerCounter.HANDSHAKES_LAYOUT),
        (HandoffError("the owner offers fewer blocks than the prompt has"), WorkerCounter.HANDSHAKES_UNFIT),
    ],
)
async def test_what_is_lent_and_does_not_fit_is_given_back_and_counted(
    refusal: HandoffError, counter: WorkerCounter
) -> None:
    """Rules 3 and 13."""
    lenders = Lenders(DigestPair())
    lenders.refusal = refusal

    received, counted = await borrowed(lenders)

    assert received == 0
    assert lenders.released == ["not needed"]
    assert {name: counted.get(name, 0) for name in HANDSHAKES} == {name: int(name is counter) for name in HANDSHAKES}


async def test_an_owner_that_has_forgotten_what_it_lent_is_counted() -> None:
    lenders = Lenders(DigestPair(lease_s=1.0))
    lenders.silence_s = 2.0

    received, counted = await borrowed(lenders)

    assert received == 0
    assert {name: counted.get(name, 0) for name in HANDSHAKES} == {
        name: int(name is WorkerCounter.HANDSHAKES_UNKNOWN) for name in HANDSHAKES
    }
