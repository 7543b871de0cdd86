"""The hot loop: a thread of its own that turns commands and steps into events.

Commands come from any thread and run between steps, so scheduler, cache and model are touched by this thread alone.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from engine.batch import Batch, Matcher, RowResult
from engine.events import EngineEvent, StepOutput
from engine.request import BorrowTerms, Part, RequestState, Totals
from engine.scheduler import Scheduler
from kv_store.block_key import KeyExtras, block_keys, root_key
from kv_store.local_cache import BlockCopy, LocalCache
from messages.errors import ServingError
from messages.handoff import BlockKey
from messages.requests import GenerationRequest, RequestId
from telemetry.step_record import StepRecord

log = logging.getLogger(__name__)

Command = Callable[[], Sequence[EngineEvent]]


class Runner(Protocol):
    """Runs the model on one batch."""

    def run(self, batch: Batch) -> Sequence[RowResult]:
        """Compute a step; one result per row."""
        ...

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks inside the arena, in order."""
        ...


class Identity(Protocol):
    """What a request's block keys say besides its tokens."""

    def extras(self, request: GenerationRequest) -> KeyExtras:
        """Typed extras for the root of the request's key chain."""
        ...


class EngineLoop:
    """Owns the step thread; every method may be called from any thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        cache: LocalCache,
        runner: Runner,
        identity: Identity,
        sink: Callable[[StepOutput], None],
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._runner = runner
        self._identity = identity
        self._sink = sink
        self._on_step = on_step
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)
        self._is_closing = False
        self._num_submitted = 0
        self._num_taken_in = 0
        self._pending: Command | None = None

    def start(self) -> None:
        """Start the step thread."""
        self._thread.start()

    def close(self) -> None:
        """Finish the step that runs, then stop; requests that are left simply end here."""
        self._is_closing = True
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether the step thread runs."""
        return self._thread.is_alive()

    def submit(
        self,
        request: GenerationRequest,
        part: Part,
        *,
        max_uncached_tokens: int | None = None,
        borrow: BorrowTerms | None = None,
        matcher: Matcher | None = None,
    ) -> int:
        """Queue a request; answers with Accepted (WHOLE, PREFILL) or Allocated (DECODE), or Failed.

        Args:
            request: What to compute.
            part: Which part of it.
            max_uncached_tokens: Refuse when more prompt tokens than this are neither cached here nor borrowed.
            borrow: WHOLE and PREFILL: Borrowing comes first when a prefix can be had on these terms.
            matcher: The grammar's state after the request's generated tokens; None when it has none.

        Returns:
            Its number, from 1 on in the order of the calls of one thread; an output whose `num_submitted` is as large
            has it in its load.
        """

        def command() -> Sequence[EngineEvent]:
            self._num_taken_in += 1
            extras = self._identity.extras(request)
            root = root_key(extras)
            state = RequestState(
                request=request,
                part=part,
                root=root,
                keys=block_keys(root, request.known_token_ids, extras.block_size),
                totals=Totals(arrived_s=time.monotonic()),
                max_uncached_tokens=max_uncached_tokens,
                borrow=borrow,
                matcher=matcher,
                choice=request.choice,
            )
            return self._scheduler.submit(state)

        self._commands.put(command)
        self._num_submitted += 1
        return self._num_submitted

    def receive(self, request_id: RequestId, num_tokens: int) -> None:
        """A pull is over; the first `num_tokens` prompt tokens have their KV, the rest is computed here."""
        self._commands.put(lambda: self._scheduler.receive(request_id, num_tokens))

    def set_aside(self, request_id: RequestId, aside_id: RequestId) -> None:
        """Let a request go on with other blocks; its old ones stay referenced until `abort(aside_id)`."""

        def command() -> Sequence[EngineEvent]:
            self._scheduler.set_aside(request_id, aside_id)
            return ()

        self._commands.put(command)

    def lend(self, lend_id: RequestId, keys: Sequence[BlockKey], first_block: int) -> None:
        """Keep a cached prefix as it is until `abort(lend_id)`; answers with Lent between two steps."""
        self._commands.put(lambda: self._scheduler.lend(lend_id, keys, first_block))

    def clear_cache(self) -> Future[int]:
        """Forget every cached block that no request uses; the number of blocks comes when it is done."""
        done: Future[int] = Future()

        def command() -> Sequence[EngineEvent]:
            if not done.set_running_or_notify_cancel():
                # Whoever asked has gone.
                return ()
            before = sum(group.cached for group in self._cache.counts())
            self._cache.clear()
            done.set_result(before - sum(group.cached for group in self._cache.counts()))
            return ()

        self._commands.put(command)
        return done

    def start_decode(self, request_id: RequestId, first_tokens: Mapping[int, int]) -> None:
        """Token 1, by choice, of the choices of a DECODE part that go on."""
        self._commands.put(lambda: self._scheduler.start(request_id, first_tokens))

    def abort(self, request_id: RequestId) -> None:
        """Forget the request in any state, also a held prefill, or a lend; its blocks are free. No event follows."""

        def command() -> Sequence[EngineEvent]:
            self._scheduler.abort(request_id)
            return ()

        self._commands.put(command)

    def _run(self) -> None:
        while not self._is_closing:
            events = self._run_commands()
            batch, admitted = self._scheduler.next_batch(time.monotonic())
            events.extend(admitted)
            if batch is not None:
                if events:
                    # What commands and admission gave must not wait for the step: readers begin with it.
                    self._emit(events)
                    events = []
                events.extend(self._step(batch))
            self._emit(events)
            if batch is None and not self._is_closing:
                self._wait()

    def _wait(self) -> None:
        # It runs first in the next turn; nothing else takes from this queue, so the order stays.
        self._pending = self._commands.get()

    def _run_commands(self) -> list[EngineEvent]:
        events: list[EngineEvent] = []
        if self._pending is not None:
            events.extend(self._pending())
            self._copy_blocks()
            self._pending = None
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return events
            if command is not None:
                events.extend(command())
                self._copy_blocks()

    def _step(self, batch: Batch) -> list[EngineEvent]:
        started_s = time.monotonic()
        try:
            results = self._runner.run(batch)
        except Exception as error:
            log.exception("engine.step_failed num_rows=%d", len(batch.rows))
            return self._scheduler.fail(batch, ServingError("the model failed on this batch", cause=repr(error)[:200]))
        now_s = time.monotonic()
        events = self._scheduler.commit(batch, results, now_s)
        self._copy_blocks()
        if self._on_step is not None:
            self._on_step(_record(batch, now_s, started_s))
        return events

    def _copy_blocks(self) -> None:
        copies = self._scheduler.take_copies()
        if copies:
            self._runner.copy_blocks(copies)

    def _emit(self, events: list[EngineEvent]) -> None:
        self._sink(
            StepOutput(
                events=tuple(events),
                changes=self._cache.take_changes(),
                load=self._scheduler.load(),
                num_submitted=self._num_taken_in,
            )
        )


def _record(batch: Batch, now_s: float, started_s: float) -> StepRecord:
    decode = sum(1 for row in batch.rows if len(row.token_ids) == 1)
    return StepRecord(
        at_s=now_s,
        prefill_tokens=batch.num_tokens - decode,
        decode_tokens=decode,
        context_tokens=sum(row.end for row in batch.rows),
        num_rows=len(batch.rows),
        duration_ms=(now_s - started_s) * 1e3,
    )
