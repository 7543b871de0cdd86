"""Who decodes and who prefills: a snapshot of the workers in, a decision out.

The order is fixed: the decode worker first, because it needs room for the KV; then local or remote prefill, from the
tokens that are not cached *on that worker*; then the prefill worker, by what is left to compute *there*. Costs are
tokens and continuous, so locality gives way to load gradually.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.pools import PoolSpec, PromptClass, classify
from messages.errors import Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One live worker as the router sees it for one request."""

    worker_id: str
    pool: str
    cached_tokens: int = 0
    """Leading prompt tokens whose KV it holds, says the registry."""
    queued_prefill_tokens: int = 0
    running: int = 0
    waiting: int = 0
    free_tokens: int = 0
    """Room for KV: free or evictable blocks, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one request needs."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRules:
    """The configured side of a decision."""

    pools: tuple[PoolSpec, ...]
    local_prefill_max_tokens: int
    """A decode worker computes up to so many uncached prompt tokens itself."""
    long_prefill_tokens: int
    running_cost_tokens: int = 32
    """What one running request weighs, in prompt tokens."""
    no_room_cost_tokens: int = 4096
    """What lacking room for the KV weighs: it will have to wait or to preempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where a request goes."""

    decode: str
    """Worker id."""
    prefill: str | None
    """Worker id; None: the decode worker computes the prompt itself."""
    uncached_tokens: int
    """Prompt tokens to compute where the prompt is computed."""
    prompt_class: PromptClass
    is_local_limited: bool = False
    """The decode worker must refuse when more than `local_prefill_max_tokens` turn out to be uncached there."""


def choose(
    demand: Demand,
    workers: Sequence[WorkerView],
    rules: RoutingRules,
    *,
    force_remote: bool = False,
    exclude: frozenset[str] = frozenset(),
) -> Decision:
    """Place one request.

    Args:
        demand: What it needs.
        workers: Live workers that take new work.
        rules: Pools and thresholds.
        force_remote: The decode worker has refused a local prefill.
        exclude: Worker ids that must not be chosen.

    Raises:
        Unavailable: No worker can decode, or none can prefill.
    """
    pools = {pool.name: pool for pool in rules.pools}
    here = [w for w in workers if w.pool in pools and w.worker_id not in exclude]
    decoders = [w for w in here if pools[w.pool].can_decode]
    if not decoders:
        raise Unavailable("no decode worker takes requests now")
    decode = min(decoders, key=lambda w: (_decode_cost(w, demand, rules), w.worker_id))
    uncached = _uncached(decode, demand)
    if uncached <= rules.local_prefill_max_tokens and not force_remote:
        return Decision(
            decode=decode.worker_id,
            prefill=None,
            uncached_tokens=uncached,
            prompt_class=classify(uncached, rules.long_prefill_tokens),
            is_local_limited=not pools[decode.pool].can_prefill,
        )
    prefill = _choose_prefill(demand, [w for w in here if w.worker_id != decode.worker_id], pools, rules)
    if prefill is None:
        if not pools[decode.pool].can_prefill:
            raise Unavailable("no prefill worker takes requests now")
        return Decision(
            decode=decode.worker_id,
            prefill=None,
            uncached_tokens=uncached,
            prompt_class=classify(uncached, rules.long_prefill_tokens),
        )
    remaining = _uncached(prefill, demand)
    return Decision(
        decode=decode.worker_id,
        prefill=prefill.worker_id,
        uncached_tokens=remaining,
        prompt_class=classify(remaining, rules.long_prefill_tokens),
    )


def _choose_prefill(
    demand: Demand, workers: Sequence[WorkerView], pools: dict[str, PoolSpec], rules: RoutingRules
) -> WorkerView | None:
    """The cheapest worker of a pool that takes the prefill; when there is none, of any pool that prefills.

    Unified workers keep their prefills to themselves: sending one to another worker gains nothing.
    """
    able = [w for w in workers if pools[w.pool].role == "prefill"]
    fitting = [w for w in able if pools[w.pool].takes(_uncached(w, demand))]
    return min(
        fitting or able,
        key=lambda w: (
            _uncached(w, demand) + w.queued_prefill_tokens + w.running * rules.running_cost_tokens,
            w.worker_id,
        ),
        default=None,
    )


def _uncached(worker: WorkerView, demand: Demand) -> int:
    # The last prompt token is always computed: its logits are token 1.
    return max(1, demand.prompt_tokens - worker.cached_tokens)


def _decode_cost(worker: WorkerView, demand: Demand, rules: RoutingRules) -> float:
    busy = (worker.running + worker.waiting) * rules.running_cost_tokens
    needed = demand.prompt_tokens - worker.cached_tokens
    no_room = rules.no_room_cost_tokens if worker.free_tokens < needed else 0
    return _uncached(worker, demand) + worker.queued_prefill_tokens + busy + no_room
