"""The decode side of one hand-off: read blocks as they become complete, close, give them to the engine.

Whatever goes wrong with the transfer costs a recompute from the first bad block on, or the request where the policy
says so, never a wrong token: nothing counts as received before the owner has answered Close with "valid".
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from deployments.config_kv import LoadFailurePolicy
from deployments.worker.handshake import handshake_failure
from kv_store.handoff_reader import HandoffReader, LocalGroups
from messages.errors import HandoffError, ServingError, TransferError
from messages.handoff import Handoff
from messages.requests import RequestId
from telemetry.metrics import WorkerCounter

log = logging.getLogger(__name__)

SETTLE_TIMEOUT_S = 2.0
"""How long a failed read may keep its request waiting for the recompute."""


class Owner(Protocol):
    """Who offers blocks, as a reader that does not want them calls it."""

    async def release(self, handoff: Handoff, reason: str) -> None:
        """Nothing (more) is needed.

        Raises:
            TransferError: It does not answer.
        """
        ...


class Owners(Protocol):
    """The other workers."""

    def owner(self, worker_id: str, incarnation: str, address: str) -> Owner:
        """One life of one of them."""
        ...

    def make_reader(self, handoff: Handoff, groups: LocalGroups) -> HandoffReader:
        """A reader for `handoff` into the local blocks `groups`.

        Raises:
            HandoffError: The hand-off does not fit this worker.
        """
        ...


class Receiver(Protocol):
    """The engine, as a pull sees it."""

    def receive(self, request_id: RequestId, num_tokens: int) -> None:
        """`num_tokens` prompt tokens are there; the rest is computed."""
        ...

    def set_aside(self, request_id: RequestId, aside_id: RequestId) -> None:
        """The request goes on with other blocks and computes its prompt; the old ones stay until `abort(aside_id)`."""
        ...

    def abort(self, request_id: RequestId) -> None:
        """Forget a request, or what was set aside."""
        ...


@dataclass(slots=True)
class PullStats:
    """What one pull moved and how long it took."""

    blocks: int = 0
    size_bytes: int = 0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    """From token 1 being known here to the blocks being valid here."""
    has_failed: bool = False
    handshake_failure: WorkerCounter | None = None
    """Why the hand-off could not be opened; None: it could."""
    digest_mismatches: int = 0

    def counters(self) -> dict[WorkerCounter, float]:
        """What it adds to the worker's counters."""
        counters: dict[WorkerCounter, float] = {
            WorkerCounter.TRANSFER_BYTES: self.size_bytes,
            WorkerCounter.TRANSFER_BLOCKS: self.blocks,
            WorkerCounter.TRANSFER_SECONDS: self.transfer_s,
            WorkerCounter.TRANSFER_FAILURES: self.has_failed,
            WorkerCounter.DIGEST_MISMATCHES: self.digest_mismatches,
        }
        if self.handshake_failure is not None:
            counters[self.handshake_failure] = 1.0
        return counters


class Pull:
    """One request's pull; `run` ends with `receive` or `set_aside`, unless it is cancelled or raises.

    Args:
        request_id: Which request.
        handoff: What the owner offers.
        owners: Makes its reader, once the destinations are known, and knows whom to tell when there is none.
        engine: Gets what arrived.
        keep: Runs what must go on after the request is forgotten.
        policy: What follows when blocks did not arrive whole.
    """

    def __init__(
        self,
        request_id: RequestId,
        handoff: Handoff,
        owners: Owners,
        engine: Receiver,
        keep: Callable[[Coroutine[Any, Any, None]], None],
        policy: LoadFailurePolicy = "recompute",
    ) -> None:
        self.stats = PullStats()
        self.settling: asyncio.Task[None] | None = None
        """After a failed read: done when the destinations may be reused."""
        self._request_id = request_id
        self._handoff = handoff
        self._owners = owners
        self._engine = engine
        self._keep = keep
        self._policy = policy
        self._destination: asyncio.Future[tuple[LocalGroups, int]] = asyncio.get_running_loop().create_future()
        self._complete_tokens = 0
        self._progressed = asyncio.Event()
        self._started = asyncio.Event()
        self._started_s: float | None = None

    def set_destination(self, groups: LocalGroups, cached_tokens: int) -> None:
        """The engine has allocated the blocks to read into."""
        if not self._destination.done():
            self._destination.set_result((groups, cached_tokens))

    def set_progress(self, complete_tokens: int) -> None:
        """The owner's blocks hold the KV of this many prompt tokens."""
        self._complete_tokens = max(self._complete_tokens, complete_tokens)
        self._progressed.set()

    def set_started(self) -> None:
        """Token 1 is known, so the whole prompt has its KV."""
        self._started_s = time.monotonic()
        self._started.set()
        self.set_progress(self._handoff.num_tokens)

    async def run(self) -> None:
        """Pull everything; on a fault of the transfer hand over what is good, or fail, as the policy says.

        Raises:
            TransferError: The policy is to fail.
        """
        groups, cached_tokens = await self._destination
        try:
            reader = self._owners.make_reader(self._handoff, groups)
        except HandoffError as error:
            self.stats.handshake_failure = handshake_failure(error)
            # The owner is told, but not waited for.
            self._keep(self._decline())
            self._recover(cached_tokens, error)
            return
        try:
            good_tokens, failure = await self._read(reader)
        except BaseException:
            # Cancelled: destinations must be quiet before the engine may reuse them.
            await asyncio.shield(reader.abandon())
            raise
        if failure is None:
            self._finish(self._handoff.num_tokens)
        else:
            await self._settle(reader, max(cached_tokens, good_tokens), failure)

    async def _decline(self) -> None:
        handoff = self._handoff
        owner = self._owners.owner(handoff.worker_id, handoff.incarnation, handoff.address)
        try:
            await owner.release(handoff, "not needed")
        except (TransferError, HandoffError) as error:
            log.info("handoff.release_failed handoff_id=%s error=%s", handoff.handoff_id, error)

    def _recover(self, good_tokens: int, failure: ServingError) -> None:
        log.warning("pull.failed request_id=%s good_tokens=%d error=%s", self._request_id, good_tokens, failure)
        self.stats.has_failed = True
        if self._policy == "fail":
            raise TransferError("the KV blocks did not arrive whole", cause=str(failure)) from failure
        self._finish(good_tokens)

    async def _settle(self, reader: HandoffReader, good_tokens: int, failure: ServingError) -> None:
        """Recover, in the same blocks once no late byte can land there, else in other ones."""
        if reader.is_quiet():
            # The owner is told, but not waited for.
            self._keep(reader.abandon("transfer failed"))
            self._recover(good_tokens, failure)
            return
        self.settling = settling = asyncio.create_task(reader.abandon("transfer failed"))
        done, _ = await asyncio.wait([settling], timeout=SETTLE_TIMEOUT_S)
        if done or self._policy == "fail":
            self._recover(good_tokens, failure)
            return
        # The prompt is computed without being sampled from, so token 1 must be known first.
        await self._started.wait()
        aside_id = RequestId(f"aside-{uuid.uuid4().hex}")
        log.warning("pull.silent_owner request_id=%s aside_id=%s error=%s", self._request_id, aside_id, failure)
        self.stats.has_failed = True
        self._engine.set_aside(self._request_id, aside_id)
        self._keep(self._give_back(aside_id, settling))
        self.settling = None

    async def _give_back(self, aside_id: RequestId, settling: asyncio.Task[None]) -> None:
        await asyncio.wait([settling])
        self._engine.abort(aside_id)

    def _finish(self, num_tokens: int) -> None:
        if self._started_s is not None:
            self.stats.exposed_s = time.monotonic() - self._started_s
        self._engine.receive(self._request_id, num_tokens)

    async def _read(self, reader: HandoffReader) -> tuple[int, ServingError | None]:
        """Read and close; gives the leading tokens that are good, and what went wrong."""
        failure: ServingError | None = None
        try:
            await self._follow(reader)
        except (TransferError, HandoffError) as error:
            failure = error
        try:
            # What came before a failure is good if the owner still says so; one that is silent is not waited for.
            async with asyncio.timeout(None if failure is None else SETTLE_TIMEOUT_S):
                moved = await reader.close()
        except (TransferError, HandoffError, TimeoutError) as error:
            late = TransferError("the owner of the blocks does not answer Close")
            return 0, failure or (late if isinstance(error, TimeoutError) else error)
        stats = self.stats
        stats.blocks, stats.size_bytes, stats.transfer_s = moved.blocks, moved.size_bytes, moved.seconds
        stats.digest_mismatches = moved.digest_mismatches
        if moved.digest_mismatches and failure is None:
            failure = TransferError("blocks arrived with other bytes", num_blocks=moved.digest_mismatches)
        return moved.good_tokens, failure

    async def _follow(self, reader: HandoffReader) -> None:
        """Read blocks as the prefill makes them complete."""
        try:
            await reader.open()
        except (TransferError, HandoffError) as error:
            self.stats.handshake_failure = handshake_failure(error)
            raise
        done = 0
        while done < self._handoff.num_tokens:
            if self._complete_tokens == done:
                self._progressed.clear()
                await self._progressed.wait()
                continue
            done = self._complete_tokens
            await reader.read_through(done)
