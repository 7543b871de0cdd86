"""The borrowing side of one prefix: ask its holders to lend, read their parts at the same time, keep what is whole.

Parts are contiguous and in order, so the good prefix ends at the first part that came short. Whatever fails costs a
recompute, never a wrong token: a part counts only after its owner has answered Close with "valid".
"""

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.reuse import SourcePart, split_sources
from deployments.worker.handshake import handshake_failure
from deployments.worker.pull import SETTLE_TIMEOUT_S
from engine.events import Borrowing
from kv_store.handoff_reader import HandoffReader, LocalGroups, ReadStats
from messages.errors import HandoffError, TransferError
from messages.handoff import BlockKey, Handoff
from messages.requests import RequestId
from messages.reuse import PrefixSource, ReuseOffer
from telemetry.metrics import WorkerCounter

log = logging.getLogger(__name__)

SLICE_BLOCKS = 256
"""Read at a time, so that a read which fails late has brought something."""


class PrefixOwner(Protocol):
    """A worker that may lend, as a borrower calls it."""

    async def lend(self, incarnation: str, keys: Sequence[BlockKey], first_block: int) -> Handoff | None:
        """Offer what it holds of a prefix; None: nothing beyond `first_block` blocks.

        Raises:
            TransferError: It does not answer.
        """
        ...

    async def release(self, handoff: Handoff, reason: str) -> None:
        """Nothing (more) is needed."""
        ...


class Lenders(Protocol):
    """The other workers."""

    def owner(self, worker_id: str, incarnation: str, address: str) -> PrefixOwner:
        """One life of one of them."""
        ...

    def make_reader(self, handoff: Handoff, groups: LocalGroups) -> HandoffReader:
        """A reader for `handoff` into the local blocks `groups`."""
        ...


class BorrowingEngine(Protocol):
    """The engine, as a borrow sees it."""

    def receive(self, request_id: RequestId, num_tokens: int) -> None:
        """The first `num_tokens` prompt tokens are there; the rest is computed."""
        ...

    def set_aside(self, request_id: RequestId, aside_id: RequestId) -> None:
        """The blocks may still be written: go on with others and keep these as `aside_id`."""
        ...

    def abort(self, request_id: RequestId) -> None:
        """Give back what is kept under an id."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BorrowLimits:
    """How a worker borrows."""

    block_size: int
    has_windows: bool
    """A shorter prefix needs other blocks, so that a part alone is worth nothing."""
    deadline_s: float
    """From the first call to the last byte."""


@dataclass(slots=True)
class BorrowStats:
    """What one borrow brought."""

    workers: list[str] = field(default_factory=list)
    """Whose blocks are in the good prefix, in the order of the blocks."""
    tokens: int = 0
    """Gained over what was here."""
    blocks: int = 0
    size_bytes: int = 0
    transfer_s: float = 0.0
    """From the first call to the last byte; the parts come at the same time."""
    num_failed: int = 0
    """Sources that did not give what they were believed to hold."""
    digest_mismatches: int = 0
    handshake_failures: Counter[WorkerCounter] = field(default_factory=Counter)
    """Why lent parts could not be opened."""

    def add(self, moved: ReadStats) -> None:
        """Count a read that its owner has declared valid."""
        self.blocks += moved.blocks
        self.size_bytes += moved.size_bytes
        self.digest_mismatches += moved.digest_mismatches

    def counters(self) -> dict[WorkerCounter, float]:
        """What it adds to the worker's counters."""
        return {
            WorkerCounter.REUSE_PULLS: 1.0,
            WorkerCounter.REUSE_FAILURES: self.num_failed,
            WorkerCounter.TRANSFER_BYTES: self.size_bytes,
            WorkerCounter.TRANSFER_BLOCKS: self.blocks,
            WorkerCounter.TRANSFER_SECONDS: self.transfer_s,
            WorkerCounter.DIGEST_MISMATCHES: self.digest_mismatches,
            **self.handshake_failures,
        }


class Borrow:
    """One request's borrow; `run` ends with `receive` or `set_aside`, unless it is cancelled.

    Args:
        wanted: What the engine asks for, and where it goes.
        offer: Who may have it.
        lenders: The other workers.
        engine: Gets what arrived.
        limits: How to go about it.
        keep: Runs what must go on after the request is forgotten.
    """

    def __init__(
        self,
        wanted: Borrowing,
        offer: ReuseOffer,
        lenders: Lenders,
        engine: BorrowingEngine,
        limits: BorrowLimits,
        keep: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self.stats = BorrowStats()
        self._wanted = wanted
        self._sources = offer.sources
        self._min_blocks = max(1, offer.min_tokens // limits.block_size)
        self._lenders = lenders
        self._engine = engine
        self._limits = limits
        self._keep = keep
        self._first = wanted.cached_tokens // limits.block_size
        self._readers: list[HandoffReader] = []

    async def run(self) -> None:
        """Fetch as much of the prefix as arrives whole in time, and tell the engine."""
        request_id = self._wanted.request_id
        try:
            good = await self._fetch(self._parts())
        except BaseException:
            # Cancelled: destinations must be quiet before the engine may reuse them.
            await asyncio.shield(self._settle())
            raise
        settling = asyncio.create_task(self._settle())
        try:
            await asyncio.wait_for(asyncio.shield(settling), SETTLE_TIMEOUT_S)
        except TimeoutError:
            aside_id = RequestId(f"aside-{uuid.uuid4().hex}")
            log.warning("borrow.silent_lender request_id=%s aside_id=%s", request_id, aside_id)
            self.stats.tokens, self.stats.workers = 0, []
            self._engine.set_aside(request_id, aside_id)
            self._keep(self._give_back(aside_id, settling))
        except asyncio.CancelledError:
            await asyncio.shield(settling)
            raise
        else:
            self._engine.receive(request_id, good * self._limits.block_size)

    def _parts(self) -> list[SourcePart]:
        end = len(self._wanted.keys)
        held = [min(source.num_blocks, end) for source in self._sources]
        return split_sources(self._first, held, end if self._limits.has_windows else self._min_blocks)

    async def _fetch(self, parts: list[SourcePart]) -> int:
        """Read all parts at once; gives the end of the good prefix, in blocks."""
        fetches = [_Fetch(part) for part in parts]
        if fetches:
            await self._run_in_time(fetches)
        good = self._first
        for fetch in fetches:
            good = max(good, fetch.good)
            self.stats.workers.extend(worker for worker in fetch.workers if worker not in self.stats.workers)
            if fetch.good < fetch.part.end:
                break
        self.stats.tokens = (good - self._first) * self._limits.block_size
        return good

    async def _run_in_time(self, fetches: list["_Fetch"]) -> None:
        """Read until the deadline; what has not arrived then is given up."""
        started_s = time.monotonic()
        tasks = [asyncio.create_task(self._fetch_part(fetch)) for fetch in fetches]
        try:
            done, late = await asyncio.wait(tasks, timeout=self._limits.deadline_s)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self.stats.transfer_s = time.monotonic() - started_s
        self.stats.num_failed += len(late)
        if late:
            log.warning("borrow.late request_id=%s num_parts=%d", self._wanted.request_id, len(late))
        for fault in (task.exception() for task in done if not task.cancelled()):
            if fault is not None:
                log.error("borrow.crashed request_id=%s", self._wanted.request_id, exc_info=fault)

    async def _fetch_part(self, fetch: "_Fetch") -> None:
        """Read a part from its source, and what is missing then from one other."""
        part = fetch.part
        await self._read(fetch, self._sources[part.source])
        others = (s for i, s in enumerate(self._sources) if i != part.source and s.num_blocks > fetch.good)
        other = next(others, None)
        if fetch.good < part.end and other is not None:
            await self._read(fetch, other)

    async def _read(self, fetch: "_Fetch", source: PrefixSource) -> None:
        """Read what is still missing of a part from one source."""
        first, end = fetch.good, fetch.part.end
        owner = self._lenders.owner(source.worker_id, source.incarnation, source.address)
        try:
            handoff = await self._borrow(owner, source, first, end)
            if handoff is not None:
                await self._read_lent(owner, handoff, fetch)
        except (TransferError, HandoffError) as error:
            log.warning(
                "borrow.failed request_id=%s source=%s error=%s", self._wanted.request_id, source.worker_id, error
            )
        if fetch.good > first:
            fetch.workers.append(source.worker_id)
        if fetch.good < min(end, source.num_blocks):
            self.stats.num_failed += 1

    async def _borrow(self, owner: PrefixOwner, source: PrefixSource, first: int, end: int) -> Handoff | None:
        """Ask for a lend; one that is granted after we were cancelled is given back."""
        asking = asyncio.ensure_future(owner.lend(source.incarnation, self._wanted.keys[:end], first))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._keep(_decline(owner, asking))
            raise

    async def _read_lent(self, owner: PrefixOwner, handoff: Handoff, fetch: "_Fetch") -> None:
        """Read a part as far as it is lent; what arrived whole before a failure counts too.

        Raises:
            TransferError: A read failed; its destinations are quiet.
            HandoffError: The owner refuses, or its lease is over.
        """
        try:
            groups = _between(self._wanted.groups, fetch.good, fetch.part.end)
            reader = self._lenders.make_reader(handoff, groups)
        except HandoffError as error:
            self.stats.handshake_failures[handshake_failure(error)] += 1
            await owner.release(handoff, "not needed")
            raise
        self._readers.append(reader)
        failure: Exception | None = None
        try:
            await self._read_slices(reader, handoff.num_tokens, fetch.good)
        except (TransferError, HandoffError) as error:
            failure = error
        try:
            # An owner that has failed is not waited for.
            async with asyncio.timeout(None if failure is None else SETTLE_TIMEOUT_S):
                moved = await reader.close()
        except (TransferError, HandoffError) as error:
            failure = failure or error
        except TimeoutError:
            pass
        else:
            self.stats.add(moved)
            fetch.good = max(fetch.good, min(fetch.part.end, self._good_blocks(moved, handoff)))
        if reader.is_quiet():
            # An owner that does not answer need not be waited for.
            self._keep(reader.abandon("over"))
        else:
            # Another source may be asked to write into the same blocks.
            await reader.abandon("transfer failed")
        self._readers.remove(reader)
        if failure is not None:
            raise failure

    async def _read_slices(self, reader: HandoffReader, num_tokens: int, first: int) -> None:
        try:
            await reader.open()
        except (TransferError, HandoffError) as error:
            self.stats.handshake_failures[handshake_failure(error)] += 1
            raise
        step = SLICE_BLOCKS * self._limits.block_size
        for read_tokens in range(first * self._limits.block_size + step, num_tokens, step):
            await reader.read_through(read_tokens)
        await reader.read_through(num_tokens)

    def _good_blocks(self, moved: ReadStats, handoff: Handoff) -> int:
        if self._limits.has_windows and moved.good_tokens < handoff.num_tokens:
            return 0
        return min(moved.good_tokens, handoff.num_tokens) // self._limits.block_size

    async def _settle(self) -> None:
        """Give up what is being read; returns when no late byte can land any more."""
        await asyncio.gather(*(reader.abandon() for reader in self._readers))

    async def _give_back(self, aside_id: RequestId, settling: asyncio.Task[None]) -> None:
        await asyncio.wait([settling])
        self._engine.abort(aside_id)


@dataclass(slots=True)
class _Fetch:
    """How far one part has come."""

    part: SourcePart
    good: int = field(init=False)
    """End of what is good, in blocks."""
    workers: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.good = self.part.first


async def _decline(owner: PrefixOwner, asking: asyncio.Future[Handoff | None]) -> None:
    try:
        handoff = await asking
        if handoff is not None:
            await owner.release(handoff, "aborted")
    except (TransferError, HandoffError) as error:
        log.info("borrow.release_failed error=%s", error)


def _between(groups: LocalGroups, first: int, end: int) -> LocalGroups:
    return tuple(
        tuple(block_id if first <= index < end else None for index, block_id in enumerate(group)) for group in groups
    )
