"""Which pools may take a request now: its own, others when those are over, anyone when it has waited too long.

A pool is *over* when the queues or the KV of its workers are filled to `enter`, and stays over until they have come
down to `leave`; never does it change twice within `hold_s`. While every pool of a request is over, others are open to
it, as far as it fits below their own `enter`. It goes both ways, but not alike: a short prompt hardly delays long ones,
while a long one blocks its worker for many short ones, so it goes to a pool of shorter ones only while most of the
workers there have nothing to compute. Spilling adds candidates and takes none away, so continuous costs stay so.

The state is small: one row per pool. Everything about workers comes in as arrays, one element per worker.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cluster.pools import PoolSpec, has_prefill_pool
from messages.errors import Unavailable

Kind = Literal["prefill", "decode"]
Reason = Literal["own", "over", "full", "dead", "aged"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_NO_LIMIT = np.iinfo(np.int64).max
_NO_POOL = PoolSpec(name="", role="decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpillRules:
    """When a pool's requests may go to others; loads are fractions, 1 is filled."""

    enter: float = 0.8
    leave: float = 0.5
    hold_s: float = 1.0
    """A pool stays over, or not over, for at least so long."""
    long_max_wait_s: float = 10.0
    """Every request should have begun within this: when half of it is over, it may go to any pool. A worker's queue
    without `max_queue_tokens` counts as filled when computing it takes so long."""
    min_retry_s: float = 1.0
    """Least time after which a refused request is told to come again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoads:
    """Newest loads of all workers; each array has one element per worker."""

    queued_prefill_tokens: Floats | Ints
    prefill_tokens_s: Floats
    """Prompt tokens that it computes per second, > 0."""
    free_tokens: Floats | Ints
    """Room for KV, free or evictable."""
    total_tokens: Floats | Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """One pool as the board sees it."""

    name: str
    num_workers: int
    prefill_load: float
    """How far its queues are filled, in [0, 1], on average over its workers."""
    decode_load: float
    """How far its KV is, or the queues of a unified pool if those are filled more."""
    is_over_prefill: bool
    is_over_decode: bool
    num_switches: int
    """How often it has become over or not over, both kinds together."""
    prefill_tokens_s: float
    """Prompt tokens per second of all its workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """Which workers may take one request, and why; each mask has one element per worker."""

    mask: Bools
    own: Bools
    """Those of the pools that the request belongs to."""
    reason: Reason
    """own: only its own pools. over, full, dead: its own pools are filled, refuse more, or have no healthy member.
    aged: it has waited too long."""


class PoolBoard:
    """Loads and spill states of all pools; a worker's pool is given as the index into `pools`."""

    def __init__(self, pools: Sequence[PoolSpec], rules: SpillRules, clock: Callable[[], float]) -> None:
        """Begin with empty pools.

        Args:
            pools: In the order of their indices.
            rules: When to spill.
            clock: Seconds, monotonic.
        """
        self._rules = rules
        self._clock = clock
        self._prefill = _Side(len(pools) + 1)
        self._decode = _Side(len(pools) + 1)
        self._num_workers: Floats = np.zeros(len(pools) + 1)
        self._rate: Floats = np.zeros(len(pools) + 1)
        self._drain_s: Floats = np.zeros(len(pools) + 1)
        self._is_full: Bools = np.zeros(len(pools) + 1, np.bool_)
        self._is_idle: Bools = np.zeros(len(pools) + 1, np.bool_)
        self.replace_pools(pools)

    @property
    def pools(self) -> tuple[PoolSpec, ...]:
        """What the pools take now."""
        return self._pools

    def replace_pools(self, pools: Sequence[PoolSpec]) -> None:
        """Take over new ranges of the same pools in the same order; loads and spill states stay."""
        assert len(pools) == len(self._num_workers) - 1, "ranges change, pools do not"
        self._pools = tuple(pools)
        # One pool more, which takes nothing: index -1, a row without a worker, finds it.
        specs = (*pools, _NO_POOL)
        self._can_prefill = np.array([pool.can_prefill for pool in pools] + [False], np.bool_)
        self._can_decode = np.array([pool.can_decode for pool in pools] + [False], np.bool_)
        self._least = np.array([pool.min_prefill_tokens for pool in specs], np.int64)
        self._most = np.array([_or_no_limit(pool.max_prefill_tokens) for pool in specs], np.int64)
        self._leaves_prefill = has_prefill_pool(pools)
        self._has_ranges = bool((self._least > 1).any() or (self._most < _NO_LIMIT).any())
        self._least_context = np.array([pool.min_context_tokens for pool in specs], np.int64)
        self._most_context = np.array([_or_no_limit(pool.max_context_tokens) for pool in specs], np.int64)
        # 0 stands for none in the arithmetic; what it means is decided by _has_line.
        self._line = np.array([pool.max_queue_tokens or 0 for pool in specs], np.float64)
        self._has_line = np.array([pool.max_queue_tokens is not None for pool in specs], np.bool_) & self._can_prefill

    def observe(self, pool_index: Ints, loads: WorkerLoads, usable: Bools | None = None) -> None:
        """Take over the newest loads of all workers, and open or close the pools by them.

        Args:
            pool_index: Of each worker; -1: no worker.
            loads: Of the same workers.
            usable: Which of them are healthy and take new work; None: all.
        """
        rows = np.flatnonzero(pool_index >= 0 if usable is None else usable & (pool_index >= 0))
        pools = pool_index[rows]
        queued, rate = loads.queued_prefill_tokens[rows], loads.prefill_tokens_s[rows]
        total = loads.total_tokens[rows].astype(np.float64)
        line = np.where(self._has_line[pools], self._line[pools], rate * self._rules.long_max_wait_s)
        queue_fill = np.clip(queued / np.maximum(line, 1.0), 0.0, 1.0)
        kv_fill = np.clip(1.0 - loads.free_tokens[rows] / np.maximum(total, 1.0), 0.0, 1.0)
        is_unified = (self._can_prefill & self._can_decode)[pools]
        kv_fill = np.where(is_unified, np.maximum(kv_fill, queue_fill), kv_fill)
        self._num_workers = self._sum(pools)
        self._rate = self._sum(pools, rate)
        now_s = self._clock()
        self._prefill.measure(self._mean(pools, queue_fill), self._sum(pools, line), self._rules, now_s)
        self._decode.measure(self._mean(pools, kv_fill), self._sum(pools, total), self._rules, now_s)
        # Clipped, so that one endless queue cannot make up for an empty one: filled means every worker is.
        self._is_full = self._has_line & (self._num_workers > 0) & (self._prefill.load >= 1.0)
        num_idle = self._sum(pools[queued <= 0])
        self._is_idle = (num_idle >= 2) & (2 * num_idle > self._num_workers)
        drain_s = np.full(len(self._pools) + 1, np.inf)
        np.minimum.at(drain_s, pools, np.maximum(queued - self._rules.leave * line, 0.0) / rate)
        self._drain_s = drain_s

    def allows(
        self,
        pool_index: Ints,
        remaining_tokens: Ints,
        context_tokens: int,
        *,
        kind: Kind,
        waited_s: float = 0.0,
        usable: Bools | None = None,
    ) -> Bools:
        """The mask of `decide`; same arguments, same errors."""
        return self.decide(
            pool_index, remaining_tokens, context_tokens, kind=kind, waited_s=waited_s, usable=usable
        ).mask

    def decide(
        self,
        pool_index: Ints,
        remaining_tokens: Ints,
        context_tokens: int,
        *,
        kind: Kind,
        waited_s: float = 0.0,
        usable: Bools | None = None,
    ) -> Allowance:
        """Say which workers may take one request now; at least one.

        Args:
            pool_index: Of each worker; -1: no worker.
            remaining_tokens: Prompt tokens that each would have to compute.
            context_tokens: Tokens of the whole prompt.
            kind: What is looked for.
            waited_s: How long the request has waited so far.
            usable: Workers that are healthy and may be chosen; None: all.

        Raises:
            Unavailable: No usable worker does this, or the queues of all that might are full; `retry_after_s` in the
                context says when to come again.
        """
        can = self._can_prefill if kind == "prefill" else self._can_decode
        side = self._prefill if kind == "prefill" else self._decode
        fits = self._fits(pool_index, remaining_tokens, context_tokens, kind)
        if usable is not None:
            fits &= usable
        own = fits & ~self._is_full[pool_index] if self._is_full.any() else fits
        is_aged = waited_s >= self._rules.long_max_wait_s / 2
        if not is_aged and not side.is_over.any() and own.any():
            return Allowance(mask=own, own=own, reason="own")
        able = can[pool_index] if usable is None else can[pool_index] & usable
        if not able.any():
            raise Unavailable(f"no {kind} worker takes requests now", retry_after_s=self._rules.min_retry_s)
        is_open = able & ~self._is_full[pool_index]
        if is_aged and is_open.any():
            return Allowance(mask=is_open, own=own, reason="aged")
        others = is_open & ~fits & self._has_room(side, pool_index, remaining_tokens, context_tokens, kind)
        if own.any():
            is_over = bool(side.is_over[pool_index[own]].all()) and bool(others.any())
            return Allowance(mask=own | others if is_over else own, own=own, reason="over" if is_over else "own")
        if fits.any():
            return self._instead(others, own, "full", pool_index[able])
        # Better late on a worker that is filled than never.
        return self._instead(others if others.any() else is_open, own, "dead", pool_index[able])

    def states(self) -> tuple[PoolState, ...]:
        """Every pool, for metrics and explanations."""
        return tuple(
            PoolState(
                name=pool.name,
                num_workers=int(self._num_workers[i]),
                prefill_load=float(self._prefill.load[i]),
                decode_load=float(self._decode.load[i]),
                is_over_prefill=bool(self._prefill.is_over[i]),
                is_over_decode=bool(self._decode.is_over[i]),
                num_switches=int(self._prefill.num_switches[i] + self._decode.num_switches[i]),
                prefill_tokens_s=float(self._rate[i]),
            )
            for i, pool in enumerate(self._pools)
        )

    def _fits(self, pool_index: Ints, remaining: Ints, context: int, kind: Kind) -> Bools:
        can = self._can_prefill if kind == "prefill" else self._can_decode
        holds = can & (self._least_context <= context) & (context <= self._most_context)
        rows: Bools = holds[pool_index]
        if not self._has_ranges or (kind == "decode" and self._leaves_prefill):
            return rows
        computes = (self._least[pool_index] <= remaining) & (remaining <= self._most[pool_index])
        if kind == "decode":
            # A unified pool without others to prefill for it computes what it decodes, so both of its ranges count.
            computes |= ~self._can_prefill[pool_index]
        rows &= computes
        return rows

    def _has_room(
        self,
        side: "_Side",
        pool_index: Ints,
        remaining: Ints,
        context: int,
        kind: Kind,
    ) -> Bools:
        """Whether the pool of each worker can spare what a request of another takes."""
        added = context if kind == "decode" else remaining
        filled = side.load[pool_index] + added / np.maximum(side.size, 1.0)[pool_index]
        room: Bools = (filled < self._rules.enter) & ~side.is_over[pool_index]
        if kind == "prefill" or not self._leaves_prefill:
            is_longer = self._can_prefill[pool_index] & (remaining > self._most[pool_index])
            room &= self._is_idle[pool_index] | ~is_longer
        return room

    def _instead(self, mask: Bools, own: Bools, reason: Reason, able: Ints) -> Allowance:
        if mask.any():
            return Allowance(mask=mask, own=own, reason=reason)
        full = np.unique(able[self._is_full[able]])
        drain_s = float(self._drain_s[full].min())
        raise Unavailable(
            "the queues of all workers that may take the request are full",
            retry_after_s=max(self._rules.min_retry_s, drain_s),
        )

    def _sum(self, pools: Ints, weights: Floats | None = None) -> Floats:
        return np.bincount(pools, weights, minlength=len(self._pools) + 1).astype(np.float64)

    def _mean(self, pools: Ints, values: Floats) -> Floats:
        return self._sum(pools, values) / np.maximum(self._num_workers, 1)


class _Side:
    """Load and spill state of every pool in one kind of work."""

    def __init__(self, num_pools: int) -> None:
        self.load: Floats = np.zeros(num_pools)
        self.size: Floats = np.zeros(num_pools)
        """Tokens that fill it."""
        self.is_over: Bools = np.zeros(num_pools, np.bool_)
        self.num_switches: Ints = np.zeros(num_pools, np.int64)
        self._changed_s: Floats = np.full(num_pools, -np.inf)

    def measure(self, load: Floats, size: Floats, rules: SpillRules, now_s: float) -> None:
        """Take over new loads, and change states at `enter` and `leave` where the last change is long enough ago."""
        self.load, self.size = load, size
        wanted = np.where(self.is_over, load > rules.leave, load >= rules.enter)
        changes = (wanted != self.is_over) & (now_s - self._changed_s >= rules.hold_s)
        self.is_over = self.is_over ^ changes
        self.num_switches += changes
        self._changed_s = np.where(changes, now_s, self._changed_s)


def _or_no_limit(tokens: int | None) -> int:
    return _NO_LIMIT if tokens is None else tokens
