"""All live workers of a gateway as columns: one row each, written by heartbeats, read whole by every decision.

A heartbeat costs the same however many workers there are. What only depends on the worker (how long its queue takes,
how long its steps are) is worked out then, not once per request.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from cluster.pools import PoolSpec
from cluster.reuse import GroupBytes, ReuseRules, WorkerRates
from cluster.step_time import ASSUMED, StepTimes
from messages.reservations import Admitted

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_FIRST_CAPACITY = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What stays the same in one life of a worker."""

    worker_id: str
    incarnation: str
    pool: str
    fingerprint: str = ""
    """Of its KV layout; blocks move only between equal ones."""
    step_tokens: int = 512
    """Most tokens of one step."""
    chunk_tokens: int = 512
    """Most prompt tokens of one request in one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """What a heartbeat says."""

    queued_prefill_tokens: int = 0
    """Prompt tokens still to compute of all requests that are there."""
    running: int = 0
    waiting: int = 0
    context_tokens: int = 0
    """Tokens of KV that its running requests attend to."""
    free_tokens: int = 0
    """Room for KV: free or evictable blocks, in tokens."""
    total_tokens: int = 0
    """All the room for KV."""
    rates: WorkerRates = field(default_factory=WorkerRates)
    times: StepTimes | None = None
    """None: it has made no steps yet; it is taken for one like the others of its pool."""
    admitted: tuple[Admitted, ...] = ()
    """The reservations that are counted in all this."""


@dataclass(slots=True)
class Columns:
    """One value per worker; all arrays have the same length."""

    pool: Ints
    """Index into the snapshot's pools."""
    fingerprint: Ints
    can_prefill: Bools
    can_decode: Bools
    only_prefills: Bools
    queued_prefill_tokens: Floats
    running: Floats
    waiting: Floats
    context_tokens: Floats
    free_tokens: Floats
    total_tokens: Floats
    prefill_tokens_s: Floats
    """Measured, or assumed."""
    transfer_bytes_s: Floats
    """Measured, or assumed."""
    prefill_token_ms: Floats
    decode_token_ms: Floats
    context_token_ms: Floats
    decoding: Floats
    """Requests that get a token per step, or will soon."""
    prompt_room: Floats
    """Prompt tokens that fit into a step beside the decodes; at least 1."""
    chunk_tokens: Floats
    """Of one request."""
    step_ms: Floats
    """Duration of a step now, prompt tokens not counted."""
    queue_steps: Floats
    """Steps until the queued prompt tokens are computed, those of several prompts in one step."""
    queue_ms: Floats
    """How long they take."""
    queue_work_ms: Floats
    """What of it the prompt tokens take; the rest are steps that the decodes would make anyway."""
    full_step_work_ms: Floats
    """By how much a step is longer that computes as many queued prompt tokens as it can."""
    queued_token_ms: Floats
    """What one more queued token adds to `queue_ms`."""
    last_turn: Ints
    """Number of the newest decision that chose the worker; 0: none."""

    @classmethod
    def empty(cls, capacity: int) -> "Columns":
        """Zeros."""
        return cls(**{each.name: np.zeros(capacity, _kind_of(each.name)) for each in fields(cls)})

    def first(self, length: int) -> "Columns":
        """The first rows; shares their memory."""
        return Columns(**{each.name: getattr(self, each.name)[:length] for each in fields(Columns)})

    def grown(self, capacity: int) -> "Columns":
        """A larger copy."""
        larger = Columns.empty(capacity)
        for each in fields(Columns):
            values = getattr(self, each.name)
            getattr(larger, each.name)[: len(values)] = values
        return larger

    def move(self, source: int, target: int) -> None:
        """Copy one row over another."""
        for each in fields(Columns):
            values = getattr(self, each.name)
            values[target] = values[source]


class Snapshot:
    """Live workers in rows 0 to n - 1; row numbers hold until a worker joins or leaves.

    Args:
        pools: Workers of other pools are ignored.
        assumed: Rates of workers that have measured none.
    """

    def __init__(self, pools: Sequence[PoolSpec], assumed: ReuseRules | None = None) -> None:
        self.pools = tuple(pools)
        self.worker_ids: list[str] = []
        """By row."""
        self.incarnations: list[str] = []
        """By row."""
        self.admitted: list[tuple[Admitted, ...]] = []
        """By row: the reservations that its newest heartbeat counts."""
        self.num_changes = 0
        """How often a worker has joined or left."""
        self.layouts: list[tuple[GroupBytes, ...]] = []
        """Sizes of the KV groups by fingerprint index."""
        self._pool_index = {pool.name: index for index, pool in enumerate(self.pools)}
        self._assumed = assumed or ReuseRules()
        self._rows: dict[str, int] = {}
        self._fingerprints: dict[str, int] = {}
        self._spare_fingerprints: list[int] = []
        self._pool_times: dict[int, StepTimes] = {}
        self._stored = Columns.empty(_FIRST_CAPACITY)
        self._turn = 0
        self.columns = self._stored.first(0)

    def __len__(self) -> int:
        return len(self.worker_ids)

    def update(self, facts: WorkerFacts, load: WorkerLoad) -> int | None:
        """Take in a heartbeat; a worker that is new here joins.

        Returns:
            Its row; None when its pool is not one of ours.
        """
        pool = self._pool_index.get(facts.pool)
        if pool is None:
            return None
        row = self._rows.get(facts.worker_id)
        if row is None:
            row = self._join(facts.worker_id)
        self.incarnations[row], self.admitted[row] = facts.incarnation, load.admitted
        columns, spec = self._stored, self.pools[pool]
        columns.pool[row] = pool
        columns.can_prefill[row], columns.can_decode[row] = spec.can_prefill, spec.can_decode
        columns.only_prefills[row] = spec.can_prefill and not spec.can_decode
        columns.fingerprint[row] = self._fingerprint(facts.fingerprint, load.rates.groups)
        self._write_load(row, load)
        self._write_outlook(row, facts, load, self._times_of(pool, load))
        return row

    def remove(self, worker_id: str) -> None:
        """Forget a worker; the last row takes its place. One that is not here is skipped."""
        row = self._rows.pop(worker_id, None)
        if row is None:
            return
        fingerprint = int(self.columns.fingerprint[row])
        self.num_changes += 1
        last_id, incarnation, admitted = self.worker_ids.pop(), self.incarnations.pop(), self.admitted.pop()
        if last_id != worker_id:
            self._stored.move(len(self.worker_ids), row)
            self.worker_ids[row], self.incarnations[row], self.admitted[row] = last_id, incarnation, admitted
            self._rows[last_id] = row
        self.columns = self._stored.first(len(self.worker_ids))
        self._drop_if_unused(fingerprint)

    def row_of(self, worker_id: str) -> int | None:
        """Where a worker is; None when it is not here."""
        return self._rows.get(worker_id)

    def matched_tokens(self, hits: Mapping[str, int]) -> Ints:
        """Cached prompt tokens by row, (n,), from those by worker id."""
        matched = np.zeros(len(self), np.int64)
        for worker_id, tokens in hits.items():
            row = self._rows.get(worker_id)
            if row is not None:
                matched[row] = tokens
        return matched

    def all_but(self, worker_ids: Collection[str] = ()) -> Bools:
        """True for every row, (n,), that is none of `worker_ids`."""
        allowed = np.ones(len(self), np.bool_)
        for worker_id in worker_ids:
            row = self._rows.get(worker_id)
            if row is not None:
                allowed[row] = False
        return allowed

    def note_choice(self, row: int) -> None:
        """A decision has chosen a row; who has waited longest for one is next in a round."""
        self._turn += 1
        self.columns.last_turn[row] = self._turn

    def note_prefill(self, row: int, prefill_tokens: int) -> None:
        """A row gets a request whose prompt no reservation counts; forgotten with the worker's next heartbeat."""
        columns = self.columns
        token_ms, steps = columns.queued_token_ms[row], prefill_tokens / columns.prompt_room[row]
        columns.queued_prefill_tokens[row] += prefill_tokens
        columns.queue_steps[row] += steps
        columns.queue_ms[row] += prefill_tokens * token_ms
        columns.queue_work_ms[row] += prefill_tokens * token_ms - steps * columns.step_ms[row]
        columns.waiting[row] += 1
        columns.decoding[row] += 1

    def bytes_between(self, gained_tokens: Floats | Ints) -> Floats:
        """Bytes that each row reads to lengthen its prefix by so many tokens, (n,)."""
        if len(self.layouts) == 1:
            return _bytes_of(self.layouts[0], gained_tokens)
        size_bytes = np.zeros(len(self))
        for index, groups in enumerate(self.layouts):
            rows = self.columns.fingerprint == index
            size_bytes[rows] = _bytes_of(groups, gained_tokens[rows])
        return size_bytes

    def _join(self, worker_id: str) -> int:
        row = len(self.worker_ids)
        if row == len(self._stored.pool):
            self._stored = self._stored.grown(2 * row)
        self.num_changes += 1
        self.worker_ids.append(worker_id)
        self.incarnations.append("")
        self.admitted.append(())
        self._rows[worker_id] = row
        self._stored.last_turn[row] = 0
        self.columns = self._stored.first(row + 1)
        return row

    def _fingerprint(self, fingerprint: str, groups: tuple[GroupBytes, ...]) -> int:
        index = self._fingerprints.get(fingerprint)
        if index is None:
            if not self._spare_fingerprints:
                self._spare_fingerprints.append(len(self.layouts))
                self.layouts.append(())
            index = self._fingerprints[fingerprint] = self._spare_fingerprints.pop()
        # A worker that moves no prefixes does not say how large its groups are.
        self.layouts[index] = groups or self.layouts[index]
        return index

    def _drop_if_unused(self, index: int) -> None:
        if not (self.columns.fingerprint == index).any():
            self._fingerprints = {name: used for name, used in self._fingerprints.items() if used != index}
            self._spare_fingerprints.append(index)
            self.layouts[index] = ()

    def _write_load(self, row: int, load: WorkerLoad) -> None:
        columns, rates = self._stored, load.rates
        columns.queued_prefill_tokens[row] = load.queued_prefill_tokens
        columns.running[row], columns.waiting[row] = load.running, load.waiting
        columns.context_tokens[row] = load.context_tokens
        columns.free_tokens[row], columns.total_tokens[row] = load.free_tokens, load.total_tokens
        columns.prefill_tokens_s[row] = rates.prefill_tokens_s or self._assumed.assumed_prefill_tokens_s
        columns.transfer_bytes_s[row] = rates.transfer_bytes_s or self._assumed.assumed_transfer_bytes_s

    def _times_of(self, pool: int, load: WorkerLoad) -> StepTimes:
        if load.times is None:
            return self._pool_times.get(pool, ASSUMED)
        self._pool_times[pool] = load.times
        return load.times

    def _write_outlook(self, row: int, facts: WorkerFacts, load: WorkerLoad, times: StepTimes) -> None:
        columns = self._stored
        is_decoder = bool(columns.can_decode[row])
        # Hand-offs that are being read wait; they decode before long.
        decoding = (load.running + load.waiting) * is_decoder
        context_tokens = load.context_tokens * is_decoder
        step_ms = times.step_ms(prefill_tokens=0, decode_tokens=decoding, context_tokens=context_tokens)
        room = max(1, facts.step_tokens - decoding)
        queued = load.queued_prefill_tokens
        # On average half of a queued prompt is computed when a chunk of it is.
        prompt_context = queued / (2 * max(1, load.waiting))
        work_ms = times.prefill_token_ms + times.context_token_ms * prompt_context / room
        columns.prefill_token_ms[row], columns.decode_token_ms[row] = times.prefill_token_ms, times.decode_token_ms
        columns.context_token_ms[row], columns.decoding[row] = times.context_token_ms, decoding
        columns.prompt_room[row], columns.chunk_tokens[row] = room, min(room, facts.chunk_tokens)
        columns.step_ms[row], columns.queue_steps[row] = step_ms, queued / room
        columns.queue_work_ms[row], columns.full_step_work_ms[row] = queued * work_ms, room * work_ms
        columns.queued_token_ms[row] = work_ms + step_ms / room
        columns.queue_ms[row] = queued * (work_ms + step_ms / room)


def _kind_of(name: str) -> type[np.generic]:
    if name in ("pool", "fingerprint", "last_turn"):
        return np.int64
    return np.bool_ if name in ("can_prefill", "can_decode", "only_prefills") else np.float64


def _bytes_of(groups: tuple[GroupBytes, ...], gained_tokens: Floats | Ints) -> Floats:
    """Sum over the KV groups; a window needs no more than its own tokens."""
    full = sum(group.token_bytes for group in groups if group.window is None)
    size_bytes: Floats = np.multiply(gained_tokens, full, dtype=np.float64)
    for group in groups:
        if group.window is not None:
            size_bytes += group.token_bytes * np.minimum(gained_tokens, group.window)
    return size_bytes
