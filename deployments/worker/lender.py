"""Lends cached prefixes to other workers: the engine keeps the blocks, a hand-off says until when."""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.events import Lent
from kv_store.handoff import HandoffTable
from messages.handoff import BlockKey, Handoff
from messages.requests import RequestId
from telemetry.metrics import WorkerCounter

ANSWER_TIMEOUT_S = 2.0
"""A step may be long; a borrower that waits longer than this had better compute."""


class LendingEngine(Protocol):
    """The engine, as a lender sees it."""

    def lend(self, lend_id: RequestId, keys: Sequence[BlockKey], first_block: int) -> None:
        """Answer with Lent."""
        ...

    def abort(self, request_id: RequestId) -> None:
        """End a lend."""
        ...


class Lender:
    """Every lend is being asked for or under a hand-off; their number is bounded.

    Args:
        engine: Owns the cache.
        handoffs: This worker's.
        max_lends: Most at a time; more are refused.
        clock: That of the hand-offs' leases.
        count: Adds to a counter of the worker.
    """

    def __init__(
        self,
        engine: LendingEngine,
        handoffs: HandoffTable,
        max_lends: int,
        clock: Callable[[], float],
        count: Callable[[WorkerCounter], None],
    ) -> None:
        self._engine = engine
        self._handoffs = handoffs
        self._max_lends = max_lends
        self._clock = clock
        self._count = count
        self._asked: dict[RequestId, asyncio.Future[Lent]] = {}
        self._granted: set[RequestId] = set()

    def __len__(self) -> int:
        return len(self._asked) + len(self._granted)

    async def lend(self, keys: Sequence[BlockKey], first_block: int) -> Handoff | None:
        """Offer what is cached of a prefix, if that is more than `first_block` blocks.

        Args:
            keys: Of the leading full blocks.
            first_block: The reader has what comes before.

        Returns:
            None: nothing is lent, because it is not here or too much is lent already.
        """
        if len(self) >= self._max_lends:
            self._count(WorkerCounter.LENDS_REFUSED)
            return None
        lend_id = RequestId(f"lend-{uuid.uuid4().hex}")
        answer = self._asked[lend_id] = asyncio.get_running_loop().create_future()
        try:
            self._engine.lend(lend_id, keys, first_block)
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                lent = await answer
        except BaseException as error:
            self._engine.abort(lend_id)
            if not isinstance(error, TimeoutError):
                raise
            self._count(WorkerCounter.LENDS_REFUSED)
            return None
        finally:
            del self._asked[lend_id]
        if lent.num_tokens == 0:
            self._count(WorkerCounter.LENDS_REFUSED)
            return None
        self._granted.add(lend_id)
        self._count(WorkerCounter.LENDS)
        return self._handoffs.grant(lend_id, lent.groups, lent.num_tokens, self._clock())

    def take(self, lent: Lent) -> None:
        """The engine has answered."""
        answer = self._asked.get(lent.request_id)
        if answer is not None and not answer.done():
            answer.set_result(lent)

    def note_end(self, request_id: RequestId) -> None:
        """The hand-off of a request, or of a lend, is over."""
        self._granted.discard(request_id)
