"""Which tokens the next forward pass computes: continuous batching under a token budget.

Decodes go first, one token each; prompts follow in chunks that fill the rest. Requests are admitted in order of arrival
when their known tokens fit into free blocks. When a decode finds no block, the youngest request that may be recomputed
gives its blocks back and waits at the head of the queue. A finished PREFILL part is held, blocks and all, until its
hand-off lets it go; PREFILL parts are never preempted, because a reader knows their block ids.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.batch import Batch, Row
from engine.events import Accepted, Allocated, EngineEvent, Failed, LoadSnapshot, Progress, WorkDone
from engine.request import Part, RequestState
from kv_store.block_key import block_keys
from kv_store.block_table import BlockTable
from kv_store.local_cache import LocalCache
from messages.errors import HandoffUnknown, InvalidRequest, NeedsPrefill, OutOfBlocks, Overloaded, ServingError
from messages.handoff import BlockId, BlockRef
from messages.requests import RequestId
from telemetry.metrics import WorkerCounter


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """How much one step and one queue may hold."""

    block_size: int = 32
    max_step_tokens: int = 512
    max_chunk_tokens: int = 512
    """Most prompt tokens of one request in one step."""
    max_running: int = 64
    max_waiting: int = 256
    context_length: int = 8192


class Scheduler:
    """Every request is waiting, receiving, running or held; its blocks are referenced in all but the first."""

    def __init__(self, cache: LocalCache, limits: SchedulerLimits) -> None:
        self._cache = cache
        self._limits = limits
        self._waiting: deque[RequestState] = deque()
        self._receiving: dict[RequestId, RequestState] = {}
        self._running: dict[RequestId, RequestState] = {}
        self._held: dict[RequestId, RequestState] = {}
        self._counters = dict.fromkeys(WorkerCounter, 0.0)

    # Commands

    def submit(self, state: RequestState) -> list[EngineEvent]:
        """Queue a request; it is refused at once when it can never run or the queue is full."""
        error = self._refusal(state)
        if error is not None:
            return [Failed(request_id=state.request_id, error=error)]
        self._waiting.append(state)
        return []

    def receive(self, request_id: RequestId, num_tokens: int) -> None:
        """The pull is over: the first `num_tokens` prompt tokens have their KV; the rest is computed here."""
        state = self._receiving.get(request_id)
        if state is None or state.table is None:
            return
        self._counters[WorkerCounter.PROMPT_TOKENS_TRANSFERRED] += max(0, num_tokens - state.num_computed)
        self._counters[WorkerCounter.RECOMPUTED_TOKENS] += max(0, state.num_prompt - num_tokens)
        state.num_computed = max(num_tokens, state.num_computed)
        state.is_received = True
        self._cache.mark_valid(state.table, state.num_computed, state.keys)
        self._run_when_ready(state)

    def start(self, request_id: RequestId, first_token_id: int) -> list[EngineEvent]:
        """Token 1 of a DECODE part, sampled by the prefill worker."""
        state = self._receiving.get(request_id) or self._find_waiting(request_id)
        if state is None:
            return [Failed(request_id=request_id, error=HandoffUnknown("no such prepared request"))]
        if state.num_generated == 0:
            state.tokens.append(first_token_id)
            self._run_when_ready(state)
        return []

    def abort(self, request_id: RequestId) -> bool:
        """Forget a request in any state and give its blocks back; False when it is not here."""
        for place in (self._receiving, self._running, self._held):
            state = place.pop(request_id, None)
            if state is not None:
                break
        else:
            state = self._find_waiting(request_id)
            if state is None:
                return False
            self._waiting.remove(state)
        self._drop(state)
        return True

    # One step

    def next_batch(self, now_s: float) -> tuple[Batch | None, list[EngineEvent]]:
        """Choose the next step's rows; admissions and refusals come back as events."""
        events = self._admit(now_s)
        budget = self._limits.max_step_tokens
        rows: list[Row] = []
        for state in [s for s in self._running.values() if s.gap == 1]:
            if budget == 0:
                break
            # An earlier decode of this step may have preempted this one.
            if state.request_id in self._running and self._grow(state):
                rows.append(self._row(state, 1))
                budget -= 1
        rows = [row for row in rows if row.request_id in self._running]
        for state in [s for s in self._running.values() if s.gap > 1]:
            size = self._chunk(state, budget)
            if size == 0:
                break
            rows.append(self._row(state, size))
            budget -= size
        return (Batch(rows=tuple(rows)) if rows else None), events

    def commit(self, batch: Batch, sampled: Sequence[int | None], now_s: float) -> list[EngineEvent]:
        """Take in a step's result: KV of the rows is valid, sampled tokens are appended."""
        events: list[EngineEvent] = []
        self._counters[WorkerCounter.STEPS] += 1
        for row, token_id in zip(batch.rows, sampled, strict=True):
            state = self._running[row.request_id]
            events.extend(self._commit_row(state, row, token_id, now_s))
        return events

    def fail(self, batch: Batch, error: ServingError) -> list[EngineEvent]:
        """The step raised: its requests end, their unfinished blocks never enter the prefix cache."""
        for row in batch.rows:
            self.abort(row.request_id)
        return [Failed(request_id=row.request_id, error=error) for row in batch.rows]

    def load(self) -> LoadSnapshot:
        """How busy this engine is now."""
        return LoadSnapshot(
            groups=tuple(self._cache.counts()),
            running=len(self._running),
            waiting=len(self._waiting) + len(self._receiving),
            held=len(self._held),
            queued_prefill_tokens=sum(s.gap for s in self._waiting)
            + sum(s.gap for s in self._running.values() if s.gap > 1),
            counters={name.value: value for name, value in self._counters.items()},
        )

    def request_ids(self) -> Iterator[RequestId]:
        """Every request that is here in any state."""
        for state in self._waiting:
            yield state.request_id
        for place in (self._receiving, self._running, self._held):
            yield from place

    # Admission

    def _refusal(self, state: RequestState) -> ServingError | None:
        most = state.num_prompt + state.sampling.max_tokens
        if most > self._limits.context_length:
            return InvalidRequest(
                "prompt and max_tokens exceed the context length",
                param="max_tokens",
                prompt_tokens=state.num_prompt,
                max_tokens=state.sampling.max_tokens,
                context_length=self._limits.context_length,
            )
        if any(group.total * self._limits.block_size < most for group in self._cache.counts()):
            return InvalidRequest("the request needs more KV blocks than this worker has", tokens=most)
        if len(self._waiting) >= self._limits.max_waiting:
            return Overloaded("the worker's queue is full", max_waiting=self._limits.max_waiting)
        return None

    def _admit(self, now_s: float) -> list[EngineEvent]:
        events: list[EngineEvent] = []
        while self._waiting and len(self._running) + len(self._receiving) < self._limits.max_running:
            state = self._waiting[0]
            cached = self._cache.match(state.keys, len(state.tokens))
            if not state.is_accepted and self._is_too_cold(state, cached):
                self._waiting.popleft()
                events.append(Failed(request_id=state.request_id, error=NeedsPrefill("prefix is not cached here")))
                continue
            table = self._cache.open_table(state.keys, cached)
            try:
                self._cache.extend(table, len(state.tokens))
            except OutOfBlocks:
                self._cache.drop(table)
                break
            self._waiting.popleft()
            state.table, state.num_computed = table, cached
            events.extend(self._place(state, cached, now_s))
        return events

    def _is_too_cold(self, state: RequestState, cached: int) -> bool:
        return state.max_uncached_tokens is not None and state.num_prompt - cached > state.max_uncached_tokens

    def _place(self, state: RequestState, cached: int, now_s: float) -> list[EngineEvent]:
        first_time = not state.is_accepted
        if first_time:
            state.is_accepted, state.admitted_s, state.num_cached = True, now_s, cached
            self._counters[WorkerCounter.PREFIX_QUERIES] += state.num_prompt
            self._counters[WorkerCounter.PREFIX_HITS] += cached
            self._counters[WorkerCounter.PROMPT_TOKENS_LOCAL_CACHE] += cached
        if state.part is Part.DECODE and not state.is_received:
            self._receiving[state.request_id] = state
            return [Allocated(request_id=state.request_id, cached_tokens=cached, groups=self._targets(state, cached))]
        self._running[state.request_id] = state
        if not first_time:
            return []
        groups = self._offer(state) if state.part is Part.PREFILL else None
        return [
            Accepted(
                request_id=state.request_id, cached_tokens=cached, num_prompt_tokens=state.num_prompt, groups=groups
            )
        ]

    def _table(self, state: RequestState) -> BlockTable:
        assert state.table is not None, "a placed request has a table"
        return state.table

    def _targets(self, state: RequestState, cached: int) -> tuple[tuple[BlockId | None, ...], ...]:
        first = cached // self._limits.block_size
        # Token 1 may be known already and have a block of its own; only the prompt is pulled.
        end = -(-state.num_prompt // self._limits.block_size)
        return tuple(
            tuple(None if index < first else block_id for index, block_id in enumerate(group[:end]))
            for group in self._cache.block_ids(self._table(state))
        )

    def _offer(self, state: RequestState) -> tuple[tuple[BlockRef | None, ...], ...]:
        full = state.num_prompt // self._limits.block_size
        return tuple(
            tuple(
                None if block_id is None else BlockRef(block_id=block_id, key=state.keys[i] if i < full else None)
                for i, block_id in enumerate(group)
            )
            for group in self._cache.block_ids(self._table(state))
        )

    def _run_when_ready(self, state: RequestState) -> None:
        if state.is_received and state.num_generated > 0:
            del self._receiving[state.request_id]
            self._running[state.request_id] = state

    def _find_waiting(self, request_id: RequestId) -> RequestState | None:
        return next((s for s in self._waiting if s.request_id == request_id), None)

    # Rows

    def _grow(self, state: RequestState) -> bool:
        """Make room for the known tokens, preempting younger requests if need be; False when it must wait itself."""
        while True:
            try:
                self._cache.extend(self._table(state), len(state.tokens))
            except OutOfBlocks:
                victim = self._youngest()
                if victim is None:
                    return False
                self._preempt(victim)
                if victim is state:
                    return False
            else:
                return True

    def _youngest(self) -> RequestState | None:
        candidates = [s for s in self._running.values() if s.part is not Part.PREFILL]
        return max(candidates, key=lambda s: s.admitted_s, default=None)

    def _preempt(self, state: RequestState) -> None:
        del self._running[state.request_id]
        self._drop(state)
        state.num_computed = 0
        self._waiting.appendleft(state)
        self._counters[WorkerCounter.PREEMPTIONS] += 1

    def _chunk(self, state: RequestState, budget: int) -> int:
        size = min(state.gap, budget, self._limits.max_chunk_tokens)
        if size == state.gap:
            return size
        # A chunk that ends on a block boundary makes whole blocks ready for a reader.
        aligned = (state.num_computed + size) // self._limits.block_size * self._limits.block_size
        return max(0, aligned - state.num_computed)

    def _row(self, state: RequestState, size: int) -> Row:
        start = state.num_computed
        needs_sample = start + size == len(state.tokens)
        return Row(
            request_id=state.request_id,
            token_ids=tuple(state.tokens[start : start + size]),
            start=start,
            block_ids=self._cache.block_ids(self._table(state)),
            sampling=state.sampling if needs_sample else None,
        )

    def _commit_row(self, state: RequestState, row: Row, token_id: int | None, now_s: float) -> list[EngineEvent]:
        before = state.computed_prompt_tokens
        state.advance(len(row.token_ids))
        self._counters[WorkerCounter.PROMPT_TOKENS_COMPUTED] += state.computed_prompt_tokens - before
        self._extend_keys(state)
        self._cache.mark_valid(self._table(state), state.num_computed, state.keys)
        if state.part is not Part.PREFILL:
            self._cache.slide(self._table(state), state.num_computed)
        if token_id is None:
            if state.part is Part.PREFILL:
                return [Progress(request_id=state.request_id, complete_tokens=state.num_computed)]
            return []
        return self._commit_token(state, token_id, now_s)

    def _commit_token(self, state: RequestState, token_id: int, now_s: float) -> list[EngineEvent]:
        self._counters[WorkerCounter.GENERATION_TOKENS] += 1
        if state.prefill_done_s == 0.0:
            state.prefill_done_s = now_s
        event = state.accept((token_id,))
        if event.finish_reason is None and state.part is not Part.PREFILL:
            return [event]
        done = WorkDone(
            request_id=state.request_id,
            computed_prompt_tokens=state.computed_prompt_tokens,
            queue_s=state.admitted_s - state.arrived_s,
            prefill_s=state.prefill_done_s - state.admitted_s,
        )
        del self._running[state.request_id]
        if event.finish_reason is None:
            self._held[state.request_id] = state
        else:
            self._drop(state)
        return [done, event]

    def _extend_keys(self, state: RequestState) -> None:
        size = self._limits.block_size
        full = state.num_computed // size
        if full > len(state.keys):
            new = state.tokens[len(state.keys) * size : full * size]
            state.keys.extend(block_keys(state.keys[-1] if state.keys else state.root, new, size))

    def _drop(self, state: RequestState) -> None:
        if state.table is not None:
            self._cache.drop(state.table)
            state.table = None
