"""Where prefixes go out of a worker and come in: lends for others, borrows for its own requests."""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from deployments.worker.borrow import Borrow, Lenders
from deployments.worker.entries import DeskRules, Entry
from deployments.worker.lender import Lender
from engine.events import Borrowing, Lent
from engine.loop import EngineLoop
from engine.request import BorrowTerms
from kv_store.handoff import HandoffTable
from messages.errors import ServingError, TransferError
from messages.handoff import BlockKey, Handoff
from messages.requests import RequestId
from messages.reuse import ReuseOffer
from messages.v1 import worker_pb2 as pb
from messages.wire import reuse_from_wire
from telemetry.metrics import WorkerCounter

log = logging.getLogger(__name__)


class Requests(Protocol):
    """The desk, as this part of it sees it."""

    def count(self, counter: WorkerCounter, amount: float = 1.0) -> None:
        """Add to one of the worker's counters."""
        ...

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what must come to its end although its request is gone."""
        ...

    def fail_if_here(self, request_id: RequestId, error: ServingError) -> None:
        """End a request with an error; one that has already ended stays so."""
        ...


class PrefixDesk:
    """Without rules for reuse it neither lends nor borrows."""

    def __init__(
        self, engine: EngineLoop, handoffs: HandoffTable, peers: Lenders, rules: DeskRules, requests: Requests
    ) -> None:
        self._engine = engine
        self._peers = peers
        self._rules = rules.reuse
        self._requests = requests
        max_lends = 0 if rules.reuse is None else rules.reuse.max_lends
        self._lender = Lender(engine, handoffs, max_lends, rules.clock, requests.count)

    @property
    def num_lent(self) -> int:
        """Prefixes that others read, or are about to."""
        return len(self._lender)

    async def lend(self, keys: Sequence[BlockKey], first_block: int) -> Handoff | None:
        """See `Lender.lend`."""
        return await self._lender.lend(keys, first_block)

    def take(self, lent: Lent) -> None:
        """The engine has answered a lend."""
        self._lender.take(lent)

    def note_end(self, request_id: RequestId) -> None:
        """A hand-off is over: a request's, or a lend's."""
        self._lender.note_end(request_id)

    def offer(self, message: pb.SubmitUnified | pb.SubmitPrefill) -> ReuseOffer | None:
        """Who may lend to the request of a message."""
        return reuse_from_wire(message.reuse) if self._rules is not None and message.reuse.sources else None

    def terms(self, entry: Entry) -> BorrowTerms | None:
        """When the engine is to ask for a prefix."""
        if entry.offer is None or self._rules is None:
            return None
        most = max(source.num_blocks for source in entry.offer.sources) * self._rules.borrowing.block_size
        return BorrowTerms(max_tokens=most, min_tokens=entry.offer.min_tokens)

    def borrow(self, entry: Entry, wanted: Borrowing) -> None:
        """The engine waits for a prefix: fetch it."""
        assert entry.offer is not None, "only a request with an offer borrows"
        assert self._rules is not None, "an offer is noted only where prefixes move"
        limits = self._rules.borrowing
        entry.borrow = Borrow(wanted, entry.offer, self._peers, self._engine, limits, self._requests.keep)
        entry.borrow_task = asyncio.create_task(entry.borrow.run(), name=f"borrow-{wanted.request_id}")
        entry.borrow_task.add_done_callback(lambda task: self._on_end(wanted.request_id, entry, task))

    def note_transfer(self, size_bytes: int, seconds: float) -> None:
        """Blocks of a hand-off were read: what moving them costs here."""
        if self._rules is not None:
            self._rules.rates.note_transfer(size_bytes, seconds)

    def add_rates(self, message: pb.Load) -> None:
        """Say in a heartbeat what computing and fetching cost here."""
        if self._rules is not None:
            message.rates.CopyFrom(self._rules.rates.message())

    def _on_end(self, request_id: RequestId, entry: Entry, task: asyncio.Task[None]) -> None:
        requests = self._requests
        if task.cancelled():
            # Its request is gone already, or would wait for ever.
            requests.fail_if_here(request_id, TransferError("fetching a prefix was given up"))
        if entry.borrow is None or self._rules is None or task.cancelled():
            return
        stats = entry.borrow.stats
        for counter, amount in stats.counters().items():
            requests.count(counter, amount)
        self._rules.rates.note_transfer(stats.size_bytes, stats.transfer_s)
        fault = task.exception()
        if fault is not None:
            log.error("borrow.crashed request_id=%s", request_id, exc_info=fault)
            requests.fail_if_here(request_id, ServingError("fetching a prefix failed"))
