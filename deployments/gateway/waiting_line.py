"""Requests wait here until the admission lets them begin; leaving the block gives back what they held, once."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from cluster.admission import Admission, Ask, Changes
from messages.errors import DeadlineExceeded


class WaitingLine:
    """An Admission whose requests are coroutines of one event loop."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self._turns: dict[str, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def place(self, ask: Ask) -> AsyncGenerator[None, None]:
        """Hold `ask.tokens` inside the block, from when they are there.

        Raises:
            Overloaded: It is refused, at once or because more urgent ones came.
            Unavailable: There is no worker.
            DeadlineExceeded: Its time was over before it could begin.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns[ask.request_id] = turn
        try:
            self.tell(self.admission.enter(ask))
            try:
                async with asyncio.timeout(ask.timeout_s):
                    await turn
            except TimeoutError:
                message = "the request's time was over before it could begin"
                raise DeadlineExceeded(message, timeout_s=ask.timeout_s) from None
            yield
        finally:
            del self._turns[ask.request_id]
            if turn.done() and not turn.cancelled():
                # A refusal that came together with a cancellation has been heard.
                turn.exception()
            self.tell(self.admission.leave(ask.request_id))

    def tell(self, changes: Changes) -> None:
        """Wake those whom `changes` name; also for what `set_budget` returns."""
        for request_id in changes.begun:
            if (turn := self._turns.get(request_id)) is not None and not turn.done():
                turn.set_result(None)
        for refusal in changes.refused:
            if (turn := self._turns.get(refusal.request_id)) is not None and not turn.done():
                turn.set_exception(refusal.error)
