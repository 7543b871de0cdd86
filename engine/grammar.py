"""Structured output: grammars become matchers, off the event loop and once per grammar."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from llguidance import LLTokenizer

from engine.grammar_library import make_tokenizer, start
from engine.grammar_matcher import GrammarMatcher
from engine.grammar_source import library_source, refusal
from engine.grammar_trial import TrialProcess
from engine.grammar_vocabulary import Vocabulary, read_vocabulary
from messages.errors import InvalidRequest, Overloaded, ServingError
from messages.requests import Grammar

# Measured: what the library keeps of a grammar, over its own size, for the worst kinds of schemas.
_BASE_BYTES = 1 << 20
_BYTES_PER_SOURCE_BYTE = 320
# A refusal may be due to a bad moment, so it does not stay for ever.
_REFUSAL_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """What strangers' grammars may cost."""

    max_source_bytes: int = 64 << 10
    """Longest source of a grammar."""
    compile_timeout_s: float = 5.0
    """Most processor time for one grammar."""
    max_cached: int = 128
    """Most grammars to remember, refused ones among them."""
    max_cached_bytes: int = 256 << 20
    """Most memory that they take, estimated."""
    max_waiting: int = 32
    """Most grammars that wait or are being compiled."""
    num_threads: int = 1
    """Grammars to compile at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """What became of a grammar: a matcher at its start, or the reason for refusing it."""

    found: GrammarMatcher | InvalidRequest
    cost_bytes: int
    expires_s: float


class GrammarCompiler:
    """Compiles and remembers the grammars of one model; belongs to one event loop.

    It starts its helpers (a vocabulary, a trial process) with the first grammar, so it costs nothing without one.
    """

    def __init__(
        self,
        tokenizer_folder: Path,
        vocab_size: int,
        end_token_ids: Iterable[int],
        *,
        limits: GrammarLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare.

        Args:
            tokenizer_folder: The checkpoint's folder.
            vocab_size: V, entries of the model's logits; may differ from the tokenizer's.
            end_token_ids: The model's end tokens.
            limits: Bounds; None takes the usual ones.
            clock: Seconds; for the age of refusals.
        """
        limits = limits or GrammarLimits()
        self._folder = tokenizer_folder
        self._logits_width = vocab_size
        self._end_token_ids = frozenset(end_token_ids)
        self._limits = limits
        self._clock = clock
        self._entries: OrderedDict[Grammar, _Entry] = OrderedDict()
        self._compiling: dict[Grammar, asyncio.Task[_Entry | ServingError]] = {}
        self._turns = asyncio.Semaphore(limits.num_threads)
        self._threads = ThreadPoolExecutor(limits.num_threads, thread_name_prefix="grammar")
        self._loading: asyncio.Task[tuple[Vocabulary, LLTokenizer]] | None = None
        self._idle_trials: list[TrialProcess] = []
        self.num_hits = 0
        """Grammars that were there already, or being compiled."""
        self.num_misses = 0
        """Grammars that had to be compiled."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def num_cached(self) -> int:
        """Grammars that are remembered."""
        return len(self._entries)

    @property
    def cached_bytes(self) -> int:
        """Memory that they take, estimated."""
        return sum(entry.cost_bytes for entry in self._entries.values())

    async def compile(self, grammar: Grammar) -> GrammarMatcher:
        """Make a matcher at the start of a grammar; equal grammars are compiled once.

        Raises:
            InvalidRequest: The grammar is wrong, cannot be enforced, or is too large or too complex.
            Overloaded: Too many grammars wait.
            ServingError: The model's tokenizer cannot be used for grammars.
        """
        entry = self._look_up(grammar)
        if entry is None:
            result = await asyncio.shield(self._task_of(grammar))
            if isinstance(result, ServingError):
                raise _again(result)
            entry = result
        else:
            self.num_hits += 1
        if isinstance(entry.found, InvalidRequest):
            raise _again(entry.found)
        return entry.found.fork()

    async def close(self) -> None:
        """Stop compiling and end the helpers; matchers that were given out stay good."""
        tasks = [*self._compiling.values(), *([self._loading] if self._loading is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for trial in self._idle_trials:
            await trial.close()
        self._idle_trials.clear()
        self._entries.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _look_up(self, grammar: Grammar) -> _Entry | None:
        entry = self._entries.get(grammar)
        if entry is None or entry.expires_s <= self._clock():
            return None
        self._entries.move_to_end(grammar)
        return entry

    def _task_of(self, grammar: Grammar) -> asyncio.Task[_Entry | ServingError]:
        task = self._compiling.get(grammar)
        if task is not None:
            self.num_hits += 1
            return task
        if len(self._compiling) >= self._limits.max_waiting:
            raise Overloaded("too many grammars are being compiled; try again later")
        self.num_misses += 1
        # A task of its own: the first client may leave while others wait for the same grammar.
        task = asyncio.create_task(self._make_entry(grammar), name="grammar-compile")
        self._compiling[grammar] = task
        task.add_done_callback(lambda _: self._compiling.pop(grammar, None))
        return task

    async def _make_entry(self, grammar: Grammar) -> _Entry | ServingError:
        found: GrammarMatcher | InvalidRequest
        expires_s = float("inf")
        try:
            found = await self._compile(grammar)
        except InvalidRequest as error:
            found, expires_s = error, self._clock() + _REFUSAL_S
        except ServingError as error:
            return error
        is_compiled = isinstance(found, GrammarMatcher)
        cost_bytes = len(grammar.source) * (_BYTES_PER_SOURCE_BYTE if is_compiled else 4) + is_compiled * _BASE_BYTES
        entry = _Entry(found=found, cost_bytes=cost_bytes, expires_s=expires_s)
        self._entries[grammar] = entry
        self._entries.move_to_end(grammar)
        while len(self._entries) > self._limits.max_cached or self.cached_bytes > self._limits.max_cached_bytes:
            self._entries.popitem(last=False)
        return entry

    async def _compile(self, grammar: Grammar) -> GrammarMatcher:
        source = library_source(grammar, self._limits.max_source_bytes)
        vocabulary, tokenizer = await self._load()
        async with self._turns:
            await self._try(grammar, source, vocabulary)
            try:
                state = await asyncio.get_running_loop().run_in_executor(self._threads, start, tokenizer, source)
            except ValueError as error:
                raise refusal(grammar, f"cannot be enforced: {error}") from error
        return GrammarMatcher(vocabulary, tokenizer, state)

    async def _try(self, grammar: Grammar, source: str, vocabulary: Vocabulary) -> None:
        if self._idle_trials:
            trial = self._idle_trials.pop()
        else:
            trial = TrialProcess(vocabulary.tokens, timeout_s=self._limits.compile_timeout_s)
        try:
            reason = await trial.refusal_of(source)
        finally:
            self._idle_trials.append(trial)
        if reason is not None:
            raise refusal(grammar, reason)

    async def _load(self) -> tuple[Vocabulary, LLTokenizer]:
        if self._loading is None or (self._loading.done() and self._has_failed(self._loading)):
            self._loading = asyncio.create_task(self._load_once(), name="grammar-vocabulary")
        return await asyncio.shield(self._loading)

    @staticmethod
    def _has_failed(task: asyncio.Task[tuple[Vocabulary, LLTokenizer]]) -> bool:
        return task.cancelled() or task.exception() is not None

    async def _load_once(self) -> tuple[Vocabulary, LLTokenizer]:
        def load() -> tuple[Vocabulary, LLTokenizer]:
            vocabulary = read_vocabulary(self._folder, self._logits_width, self._end_token_ids)
            return vocabulary, make_tokenizer(vocabulary.tokens)

        return await asyncio.get_running_loop().run_in_executor(self._threads, load)


def _again(error: ServingError) -> ServingError:
    """The same error for another caller: one raised twice would collect the traces of all."""
    return type(error)(error.message, **error.context)
