"""Which tokens the next forward pass computes: continuous batching under a token budget.

Decodes go first, one token each; prompts follow in chunks that fill the rest. Requests are admitted by priority, then
in order of arrival, when their known tokens fit into free blocks. When a decode finds no block, the least urgent,
youngest request that may be recomputed gives its blocks back and waits again. Choices of one request share the prompt's
blocks. A finished PREFILL part is held, blocks and all, until its hand-off lets it go; PREFILL parts are never
preempted, because a reader knows their block ids. A WHOLE or PREFILL part may borrow: it waits with its blocks until
what other workers hold of its prompt has been read, and computes the rest.
"""

from collections.abc import Iterator, Mapping, Sequence

from engine.admission import SchedulerLimits, borrowable_blocks, borrowing, is_too_cold, offer, refusal, targets
from engine.batch import Batch, Row, RowResult, Sampled
from engine.choice_blocks import ChoiceBlocks
from engine.events import Accepted, Allocated, EngineEvent, Failed, LoadSnapshot, Progress, WorkDone
from engine.lending import Lending
from engine.places import Places
from engine.request import Part, RequestState
from engine.rows import chunk_size, make_row
from kv_store.local_cache import BlockCopy, LocalCache
from messages.errors import HandoffUnknown, NeedsPrefill, OutOfBlocks, ServingError
from messages.handoff import BlockKey
from messages.requests import RequestId
from messages.tokens import TokenEvent
from telemetry.metrics import WorkerCounter


class Scheduler:
    """Every choice is waiting, receiving, running or held; its blocks are referenced in all but the first."""

    def __init__(self, cache: LocalCache, limits: SchedulerLimits) -> None:
        self._cache = cache
        self._limits = limits
        self._places = Places()
        self._blocks = ChoiceBlocks(cache, limits.block_size)
        self._lending = Lending(cache, limits.block_size)
        self._num_arrivals = 0
        self._counters = dict.fromkeys(WorkerCounter, 0.0)

    # Commands

    def submit(self, state: RequestState) -> list[EngineEvent]:
        """Queue a request; it is refused at once when it can never run or the queue is full."""
        error = refusal(state, self._limits, self._cache.counts(), len(self._places.waiting))
        if error is not None:
            return [Failed(request_id=state.request_id, error=error)]
        self._num_arrivals += 1
        state.totals.rank = self._num_arrivals
        state.totals.num_live = state.sampling.n
        self._places.wait(state)
        return []

    def receive(self, request_id: RequestId, num_tokens: int) -> list[EngineEvent]:
        """The read is over: the first `num_tokens` given tokens have their KV; the rest is computed here.

        In a model with windows they are the whole prompt, or a hit at a lender; less counts as nothing.
        """
        state = self._places.receiving.get(request_id)
        if state is None:
            return []
        if state.part is not Part.DECODE:
            return self._end_borrowing(state, num_tokens)
        if self._cache.has_windows and num_tokens < state.num_given:
            # The owner may have had a hole where a query of the recompute looks.
            num_tokens = 0
        self._counters[WorkerCounter.PROMPT_TOKENS_TRANSFERRED] += self._blocks.read(state, num_tokens)
        self._counters[WorkerCounter.RECOMPUTED_TOKENS] += state.num_given - state.num_computed
        state.is_received = True
        self._run_when_ready(state)
        return []

    def set_aside(self, request_id: RequestId, aside_id: RequestId) -> None:
        """Let a request start over with other blocks, because a failed read may still write its own.

        Those are kept under `aside_id` until it is aborted. A DECODE part, whose token 1 must be known, computes the
        prompt itself then.
        """
        state = self._places.receiving.get(request_id)
        if state is None:
            return
        if state.part is Part.DECODE:
            assert state.is_started, "a prompt that is computed here must not be sampled from"
            self._counters[WorkerCounter.RECOMPUTED_TOKENS] += state.num_given - state.num_computed
            state.is_received = True
        del self._places.receiving[request_id]
        self._lending.set_aside(aside_id, self._blocks.table(state))
        state.table, state.num_computed, state.borrow, state.has_aside = None, 0, None, True
        self._places.wait(state)

    def lend(self, lend_id: RequestId, keys: Sequence[BlockKey], first_block: int) -> list[EngineEvent]:
        """Keep what is cached of a prefix, if it is more than `first_block` blocks, until `abort(lend_id)`."""
        return [self._lending.lend(lend_id, keys, first_block)]

    def start(self, request_id: RequestId, first_tokens: Mapping[int, int]) -> list[EngineEvent]:
        """Token 1 of every choice of a DECODE part that goes on, sampled by the prefill worker.

        Args:
            request_id: Which request.
            first_tokens: Token id by choice, not empty.
        """
        state = self._places.unstarted(request_id)
        if state is None:
            return [Failed(request_id=request_id, error=HandoffUnknown("no such prepared request"))]
        if state.is_started:
            return []
        (choice, token_id), *others = sorted(first_tokens.items())
        try:
            for other, other_token_id in others:
                sibling = self._blocks.fork(state, other)
                sibling.append(other_token_id)
                state.siblings.append(sibling)
            state.choice = choice
            state.append(token_id)
        except ServingError as error:
            # A read may be writing into its blocks: whoever waits for that aborts it then.
            state.siblings.clear()
            return [Failed(request_id=request_id, error=error)]
        state.totals.num_live = len(first_tokens)
        self._run_when_ready(state)
        return []

    def abort(self, request_id: RequestId) -> bool:
        """Forget a request in any state, or a lend, and give its blocks back; False when it is not here."""
        states = self._places.remove(request_id)
        for state in states:
            self._blocks.drop(state)
        return self._lending.end(request_id) or bool(states)

    def take_copies(self) -> list[BlockCopy]:
        """Block copies to be made now, before anything else writes into the arena."""
        return self._blocks.take_copies()

    # One step

    def next_batch(self, now_s: float) -> tuple[Batch | None, list[EngineEvent]]:
        """Choose the next step's rows; admissions and refusals come back as events."""
        events = self._admit(now_s)
        budget = self._limits.max_step_tokens
        rows: list[Row] = []
        for state in [s for s in self._places.running.values() if s.gap == 1]:
            if budget == 0:
                break
            # An earlier decode of this step may have preempted this one.
            if state.key in self._places.running and self._grow(state):
                rows.append(make_row(state, 1, self._blocks.ids(state)))
                budget -= 1
        rows = [row for row in rows if (row.request_id, row.choices[0]) in self._places.running]
        for state in [s for s in self._places.running.values() if s.gap > 1]:
            size = chunk_size(state, budget, self._limits)
            if size == 0:
                break
            rows.append(make_row(state, size, self._blocks.ids(state)))
            budget -= size
        return (Batch(rows=tuple(rows)) if rows else None), events

    def commit(self, batch: Batch, results: Sequence[RowResult], now_s: float) -> list[EngineEvent]:
        """Take in a step's result: KV of the rows is valid, sampled tokens are appended."""
        events: list[EngineEvent] = []
        self._counters[WorkerCounter.STEPS] += 1
        for row, result in zip(batch.rows, results, strict=True):
            # Another choice of the request may have failed it just now.
            state = self._places.running.get((row.request_id, row.choices[0]))
            if state is not None:
                events.extend(self._commit_row(state, row, result, now_s))
        return events

    def fail(self, batch: Batch, error: ServingError) -> list[EngineEvent]:
        """The step raised: its requests end, their unfinished blocks never enter the prefix cache."""
        request_ids = dict.fromkeys(row.request_id for row in batch.rows)
        for request_id in request_ids:
            self.abort(request_id)
        return [Failed(request_id=request_id, error=error) for request_id in request_ids]

    def load(self) -> LoadSnapshot:
        """How busy this engine is now."""
        return LoadSnapshot(
            groups=tuple(self._cache.counts()),
            running=len(self._places.running),
            waiting=len(self._places.waiting) + len(self._places.receiving),
            held=len(self._places.held) + len(self._lending),
            queued_prefill_tokens=sum(s.gap for s in self._places.waiting)
            + sum(s.gap_after_borrowing for s in self._places.receiving.values())
            + sum(s.gap for s in self._places.running.values() if s.gap > 1),
            context_tokens=sum(s.num_computed for s in self._places.running.values()),
            counters={name.value: value for name, value in self._counters.items()},
        )

    def request_ids(self) -> Iterator[RequestId]:
        """Every request that is here in any state, once per choice, and every lend."""
        yield from (state.request_id for state in self._places)
        yield from self._lending

    # Admission

    def _admit(self, now_s: float) -> list[EngineEvent]:
        events: list[EngineEvent] = []
        waiting, position = self._places.waiting, 0
        while (
            position < len(waiting)
            and len(self._places.running) + len(self._places.receiving) < self._limits.max_running
        ):
            state = waiting[position]
            # The log probabilities of cached tokens would be missing.
            cached = 0 if state.wants_prompt_logprobs else self._cache.match(state.keys, len(state.tokens))
            num_wanted = borrowable_blocks(state, cached, self._limits.block_size)
            if not num_wanted and not state.totals.is_accepted and is_too_cold(state, cached):
                waiting.pop(position)
                events.append(Failed(request_id=state.request_id, error=NeedsPrefill("prefix is not cached here")))
                continue
            try:
                self._blocks.open(state, cached)
            except OutOfBlocks:
                if not state.has_aside:
                    break
                # What it lacks may be what was set aside for it; the others need not wait for that.
                position += 1
                continue
            waiting.pop(position)
            state.prompt_logprobs.clear()
            self._count_admission(state, now_s)
            if num_wanted:
                self._places.receiving[state.request_id] = state
                events.append(borrowing(state, num_wanted, self._cache, self._limits.block_size))
            else:
                events.extend(self._place(state))
        return events

    def _count_admission(self, state: RequestState, now_s: float) -> None:
        if not state.totals.is_admitted:
            state.totals.is_admitted, state.totals.admitted_s = True, now_s
            self._counters[WorkerCounter.PREFIX_QUERIES] += state.num_given
            self._counters[WorkerCounter.PREFIX_HITS] += state.num_computed
            self._counters[WorkerCounter.PROMPT_TOKENS_LOCAL_CACHE] += state.num_computed

    def _place(self, state: RequestState) -> list[EngineEvent]:
        is_first_time = not state.totals.is_accepted
        # One that is preempted later computes again what it has lost.
        state.totals.is_accepted, state.borrow = True, None
        cached = state.num_computed
        if state.part is Part.DECODE and not state.is_received:
            self._places.receiving[state.request_id] = state
            groups = targets(state, cached, state.num_given, self._cache, self._limits.block_size)
            return [Allocated(request_id=state.request_id, cached_tokens=cached, groups=groups)]
        self._places.running[state.key] = state
        if not is_first_time:
            return []
        offered = offer(state, self._cache, self._limits.block_size) if state.part is Part.PREFILL else None
        return [
            Accepted(
                request_id=state.request_id, cached_tokens=cached, num_given_tokens=state.num_given, groups=offered
            )
        ]

    def _end_borrowing(self, state: RequestState, num_tokens: int) -> list[EngineEvent]:
        del self._places.receiving[state.request_id]
        state.borrow = None
        self._counters[WorkerCounter.PROMPT_TOKENS_REMOTE_CACHE] += self._blocks.read(state, num_tokens)
        if is_too_cold(state, state.num_computed):
            self._blocks.drop(state)
            return [Failed(request_id=state.request_id, error=NeedsPrefill("the prefix could not be borrowed"))]
        return self._place(state)

    def _run_when_ready(self, state: RequestState) -> None:
        if state.is_received and state.is_started:
            # It may still wait for blocks; then the pull has not begun.
            if self._places.receiving.pop(state.request_id, None) is None:
                return
            self._places.running[state.key] = state
            self._place_siblings(state)

    # Rows

    def _grow(self, state: RequestState) -> bool:
        """Make room for the known tokens, preempting younger requests if need be; False when it must wait itself."""
        while True:
            try:
                self._blocks.grow(state)
            except OutOfBlocks:
                victim = self._places.youngest()
                if victim is None:
                    return False
                self._preempt(victim)
                if victim is state:
                    return False
            else:
                return True

    def _preempt(self, state: RequestState) -> None:
        del self._places.running[state.key]
        self._blocks.drop(state)
        state.num_computed = 0
        state.totals.was_preempted = True
        self._places.wait(state)
        self._counters[WorkerCounter.PREEMPTIONS] += 1

    # Results

    def _commit_row(self, state: RequestState, row: Row, result: RowResult, now_s: float) -> list[EngineEvent]:
        self._counters[WorkerCounter.PROMPT_TOKENS_COMPUTED] += self._blocks.compute(state, len(row.token_ids))
        self._place_siblings(state)
        self._blocks.slide(state)
        state.prompt_logprobs.extend(result.prompt_logprobs)
        if result.samples:
            return self._commit_samples(state, dict(zip(row.choices, result.samples, strict=True)), now_s)
        if state.part is Part.PREFILL:
            return [Progress(request_id=state.request_id, complete_tokens=state.num_computed)]
        return []

    def _commit_samples(self, state: RequestState, samples: dict[int, Sampled], now_s: float) -> list[EngineEvent]:
        """What was sampled at the end of a choice's known tokens; at a prompt's end, for all choices."""
        if state.totals.prefill_done_s == 0.0:
            state.totals.prefill_done_s = now_s
        self._counters[WorkerCounter.GENERATION_TOKENS] += sum(len(sample.token_ids) for sample in samples.values())
        del self._places.running[state.key]
        if state.part is Part.PREFILL:
            return self._end_prefill(state, samples)
        forks = [self._blocks.fork(state, choice) for choice in samples if choice != state.choice]
        for branch in forks:
            self._blocks.share(state, branch)
        events: list[EngineEvent] = []
        try:
            for branch in (state, *forks):
                events.extend(self._take_sample(branch, samples[branch.choice]))
        except ServingError as error:
            # A grammar gave up; the other requests of the step go on.
            for branch in (state, *forks):
                self._blocks.drop(branch)
            self.abort(state.request_id)
            return [Failed(request_id=state.request_id, error=error)]
        return events

    def _take_sample(self, branch: RequestState, sample: Sampled) -> list[EngineEvent]:
        """Append what was sampled for a choice and end the choice if that ends it."""
        event = branch.accept(sample)
        if event.finish_reason is None:
            self._go_on(branch)
            return [event]
        self._blocks.drop(branch)
        branch.totals.num_live -= 1
        return [event] if branch.totals.num_live else [_work_done(branch), event]

    def _end_prefill(self, state: RequestState, samples: Mapping[int, Sampled]) -> list[EngineEvent]:
        """Token 1 of every choice; the blocks stay for the hand-off when any choice goes on."""
        events: list[TokenEvent] = []
        for choice, sample in samples.items():
            # Only its first token is of interest; the decode worker carries the choice on.
            branch = state.fork(choice, 0)
            branch.prompt_logprobs = state.prompt_logprobs
            try:
                events.append(branch.accept(sample))
            except ServingError as error:
                self._blocks.drop(state)
                return [Failed(request_id=state.request_id, error=error)]
        if any(event.finish_reason is None for event in events):
            self._places.held[state.request_id] = state
        else:
            self._blocks.drop(state)
        return [*events[:-1], _work_done(state, is_held=state.request_id in self._places.held), events[-1]]

    def _go_on(self, state: RequestState) -> None:
        """Let a choice run, or wait for blocks when it has none."""
        self._places.running[state.key] = state
        is_due = self._limits.preempts_each_once and not state.totals.was_preempted and len(state.generated) > 2
        if state.table is None:
            del self._places.running[state.key]
            self._places.wait(state)
        elif is_due:
            self._preempt(state)

    def _place_siblings(self, state: RequestState) -> None:
        """Start the other choices of a DECODE part once the prompt has its KV."""
        if state.num_computed < state.num_given:
            return
        for sibling in state.siblings:
            sibling.is_received = True
            self._blocks.share(state, sibling)
            self._go_on(sibling)
        state.siblings.clear()


def _work_done(state: RequestState, *, is_held: bool = False) -> WorkDone:
    totals = state.totals
    return WorkDone(
        request_id=state.request_id,
        is_held=is_held,
        computed_prompt_tokens=totals.computed_prompt_tokens,
        queue_s=totals.admitted_s - totals.arrived_s,
        prefill_s=totals.prefill_done_s - totals.admitted_s,
    )
