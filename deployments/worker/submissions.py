"""Gives requests to the engine, each with its grammar compiled first if it has one."""

import asyncio
import logging
from collections.abc import Callable

from deployments.worker.entries import Entry, Grammars
from deployments.worker.prefix_desk import PrefixDesk
from deployments.worker.vitals import Vitals
from engine.batch import Matcher
from engine.loop import EngineLoop
from messages.errors import ServingError
from messages.requests import GenerationRequest, Grammar, RequestId

log = logging.getLogger(__name__)


class Submissions:
    """A request whose grammar is being compiled is not known to the engine yet.

    Args:
        engine: Gets the requests.
        grammars: Compiles.
        prefixes: Says what a request may borrow.
        vitals: Hears what the engine was given.
        fail: Ends a request whose grammar cannot be compiled.
    """

    def __init__(
        self,
        engine: EngineLoop,
        grammars: Grammars,
        prefixes: PrefixDesk,
        vitals: Vitals,
        fail: Callable[[RequestId, ServingError], None],
    ) -> None:
        self._engine = engine
        self._grammars = grammars
        self._prefixes = prefixes
        self._vitals = vitals
        self._fail = fail

    def submit(self, request: GenerationRequest, entry: Entry) -> None:
        """Give the request to the engine, at once or after its grammar."""
        grammar = request.sampling.grammar
        if grammar is None:
            self._give(request, entry, None)
            return
        work = self._compile_and_give(request, grammar, entry)
        entry.compiling = asyncio.create_task(work, name=f"grammar-{request.request_id}")

    async def _compile_and_give(self, request: GenerationRequest, grammar: Grammar, entry: Entry) -> None:
        try:
            matcher = await self._grammars.compile(grammar)
            if request.generated_token_ids:
                # A long output takes milliseconds; the matcher is nobody else's yet.
                await asyncio.to_thread(_follow, matcher, request.generated_token_ids)
        except Exception as fault:
            if not isinstance(fault, ServingError):
                log.exception("grammar.failed request_id=%s", request.request_id)
            error = fault if isinstance(fault, ServingError) else ServingError("compiling the grammar failed")
            entry.compiling = None
            self._fail(request.request_id, error)
            return
        entry.compiling = None
        self._give(request, entry, matcher)
        if entry.first_tokens:
            # Start came while the grammar was being compiled.
            self._engine.start_decode(request.request_id, entry.first_tokens)

    def _give(self, request: GenerationRequest, entry: Entry, matcher: Matcher | None) -> None:
        number = self._engine.submit(
            request,
            entry.part,
            max_uncached_tokens=entry.max_uncached_tokens,
            borrow=self._prefixes.terms(entry),
            matcher=matcher,
        )
        if entry.reservation is not None:
            self._vitals.note_submission(number, entry.reservation)


def _follow(matcher: Matcher, token_ids: tuple[int, ...]) -> None:
    for token_id in token_ids:
        matcher.accept(token_id)
