"""The decode side of one hand-off: read blocks as they become complete, close, give them to the engine.

Whatever goes wrong with the transfer costs a recompute here, never a wrong token: nothing counts as received before
the owner has answered Close with "valid".
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kv_store.handoff_reader import HandoffReader, LocalGroups
from messages.errors import HandoffError, ServingError, TransferError
from messages.handoff import Handoff
from messages.requests import RequestId

log = logging.getLogger(__name__)

SETTLE_TIMEOUT_S = 2.0
"""How long a failed read may keep its request waiting for the recompute."""

MakeReader = Callable[[Handoff, LocalGroups], HandoffReader]


class Receiver(Protocol):
    """The engine, as a pull sees it."""

    def receive(self, request_id: RequestId, num_tokens: int) -> None:
        """`num_tokens` prompt tokens are there; the rest is computed."""
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


class Pull:
    """One request's pull; `run` ends with `engine.receive` unless it is cancelled."""

    def __init__(self, request_id: RequestId, handoff: Handoff, make_reader: MakeReader, engine: Receiver) -> None:
        self.stats = PullStats()
        self.settling: asyncio.Task[None] | None = None
        """After a failed read: done when the destinations may be reused."""
        self._request_id = request_id
        self._handoff = handoff
        self._make_reader = make_reader
        self._engine = engine
        self._destination: asyncio.Future[tuple[LocalGroups, int]] = asyncio.get_running_loop().create_future()
        self._complete_tokens = 0
        self._progressed = asyncio.Event()
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
        self.set_progress(self._handoff.num_tokens)

    async def run(self) -> None:
        """Pull everything; on a fault of the transfer hand over what was here before."""
        groups, cached_tokens = await self._destination
        reader = self._make_reader(self._handoff, groups)
        try:
            await self._read(reader)
        except (TransferError, HandoffError) as error:
            log.warning("pull.failed request_id=%s error=%s", self._request_id, error)
            self.stats.has_failed = True
            await self._settle(reader, error)
            self._finish(cached_tokens)
        except BaseException:
            # Cancelled: destinations must be quiet before the engine may reuse them.
            await asyncio.shield(reader.abandon())
            raise
        else:
            self._finish(self._handoff.num_tokens)

    async def _settle(self, reader: HandoffReader, error: ServingError) -> None:
        """Wait until no late byte can land in the destinations, because the recompute writes there.

        Raises:
            TransferError: A silent owner keeps them busy for too long; `settling` is done when they are quiet.
        """
        self.settling = asyncio.create_task(reader.abandon("transfer failed"))
        done, _ = await asyncio.wait([self.settling], timeout=SETTLE_TIMEOUT_S)
        if not done:
            raise TransferError("the owner of the blocks is silent in the middle of a read") from error

    def _finish(self, num_tokens: int) -> None:
        if self._started_s is not None:
            self.stats.exposed_s = time.monotonic() - self._started_s
        self._engine.receive(self._request_id, num_tokens)

    async def _read(self, reader: HandoffReader) -> None:
        await reader.open()
        done = 0
        while done < self._handoff.num_tokens:
            if self._complete_tokens == done:
                self._progressed.clear()
                await self._progressed.wait()
                continue
            done = self._complete_tokens
            await reader.read_through(done)
        moved = await reader.close()
        self.stats.blocks, self.stats.size_bytes, self.stats.transfer_s = moved.blocks, moved.size_bytes, moved.seconds
