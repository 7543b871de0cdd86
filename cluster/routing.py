"""Who decodes and who prefills: a snapshot of the workers in, a decision out.

The order is fixed: the decode worker first, because it needs room for the KV; then local or remote prefill, from the
tokens that are not cached *on that worker*; then the prefill worker, by what is left to compute *there*. Costs are
tokens and continuous, so locality gives way to load gradually. A prefix that another worker holds counts as what
fetching it costs, where that is cheaper than computing it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.pools import PoolSpec, PromptClass, classify, has_prefill_pool
from cluster.reuse import Holder, ReusePlan, ReuseRules, WorkerRates, assess_reuse, best_first, plan_reuse
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
    fingerprint: str = ""
    """Of its KV layout; blocks move only between equal ones."""
    rates: WorkerRates = field(default_factory=WorkerRates)


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
    reuse: ReuseRules | None = None
    """When prefixes move between workers; None: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where a request goes."""

    decode: str
    """Worker id."""
    prefill: str | None
    """Worker id; None: the decode worker computes the prompt itself."""
    uncached_tokens: int
    """Prompt tokens to compute where the prompt is computed, after what is fetched."""
    prompt_class: PromptClass
    is_local_limited: bool = False
    """The decode worker must refuse when more than `local_prefill_max_tokens` turn out to be uncached there."""
    reuse: ReusePlan = field(default_factory=ReusePlan)
    """What the worker that computes the prompt fetches before, and why."""


class _Prompt:
    """One prompt against one snapshot of workers: what each would have to fetch and to compute."""

    def __init__(self, demand: Demand, workers: Sequence[WorkerView], rules: RoutingRules) -> None:
        self._prompt_tokens = demand.prompt_tokens
        self._rules = rules.reuse
        self._holders: dict[str, list[Holder]] = {}
        if rules.reuse is None:
            return
        for worker in workers:
            if worker.cached_tokens:
                load = worker.running * rules.running_cost_tokens + worker.queued_prefill_tokens
                holder = Holder(worker_id=worker.worker_id, num_tokens=worker.cached_tokens, load=load)
                self._holders.setdefault(worker.fingerprint, []).append(holder)
        self._holders = {fingerprint: best_first(holders) for fingerprint, holders in self._holders.items()}

    def plan(self, worker: WorkerView) -> ReusePlan:
        """What `worker` would fetch, and from whom."""
        if self._rules is None:
            return ReusePlan()
        # One more than may be asked, because the worker itself may be among them.
        first = self._holders.get(worker.fingerprint, [])[: self._rules.max_sources + 1]
        others = [holder for holder in first if holder.worker_id != worker.worker_id]
        return plan_reuse(worker.cached_tokens, others, self._prompt_tokens, worker.rates, self._rules)

    def uncached(self, worker: WorkerView) -> int:
        """Tokens that `worker` would compute with what it has now."""
        # The last prompt token is always computed: its logits are token 1.
        return max(1, self._prompt_tokens - worker.cached_tokens)

    def remaining(self, worker: WorkerView) -> int:
        """Tokens that `worker` would compute after what it fetches."""
        plan = self._assess(worker)
        return self.uncached(worker) - (plan.gained_tokens if plan.verdict == "fetch" else 0)

    def cost(self, worker: WorkerView) -> float:
        """What fetching and computing weigh together."""
        return self.uncached(worker) - self._assess(worker).saved_tokens

    def _assess(self, worker: WorkerView) -> ReusePlan:
        if self._rules is None:
            return ReusePlan()
        first = self._holders.get(worker.fingerprint, [])[:2]
        best = next((holder.num_tokens for holder in first if holder.worker_id != worker.worker_id), 0)
        return assess_reuse(worker.cached_tokens, best, self._prompt_tokens, worker.rates, self._rules)


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
    prompt = _Prompt(demand, here, rules)
    able = [w for w in here if pools[w.pool].can_decode]
    leaves_prefill = has_prefill_pool(rules.pools)
    own = [
        w for w in able if pools[w.pool].decodes(demand.prompt_tokens, None if leaves_prefill else prompt.remaining(w))
    ]
    decoders = own or able
    if not decoders:
        raise Unavailable("no decode worker takes requests now")
    decode = min(decoders, key=lambda w: (_decode_cost(w, prompt, demand, rules), w.worker_id))
    is_local = prompt.remaining(decode) <= rules.local_prefill_max_tokens and not force_remote
    prefill = None
    if not is_local:
        others = [w for w in here if w.worker_id != decode.worker_id]
        prefill = _choose_prefill(prompt, demand, others, pools, rules)
        if prefill is None and not pools[decode.pool].can_prefill:
            raise Unavailable("no prefill worker takes requests now")
    computing = prefill or decode
    remaining = prompt.remaining(computing)
    return Decision(
        decode=decode.worker_id,
        prefill=prefill.worker_id if prefill is not None else None,
        uncached_tokens=remaining,
        prompt_class=classify(remaining, rules.long_prefill_tokens),
        is_local_limited=is_local and not pools[decode.pool].can_prefill,
        reuse=prompt.plan(computing),
    )


def _choose_prefill(
    prompt: _Prompt, demand: Demand, workers: Sequence[WorkerView], pools: dict[str, PoolSpec], rules: RoutingRules
) -> WorkerView | None:
    """The cheapest worker of a pool that takes the prefill; when there is none, of any pool that prefills.

    Unified workers keep their prefills to themselves: sending one to another worker gains nothing.
    """
    able = [w for w in workers if pools[w.pool].role == "prefill"]
    fitting = [w for w in able if pools[w.pool].takes(prompt.remaining(w), demand.prompt_tokens)]
    return min(
        fitting or able,
        key=lambda w: (
            prompt.cost(w) + w.queued_prefill_tokens + w.running * rules.running_cost_tokens,
            w.worker_id,
        ),
        default=None,
    )


def _decode_cost(worker: WorkerView, prompt: _Prompt, demand: Demand, rules: RoutingRules) -> float:
    busy = (worker.running + worker.waiting) * rules.running_cost_tokens
    needed = demand.prompt_tokens - worker.cached_tokens
    no_room = rules.no_room_cost_tokens if worker.free_tokens < needed else 0
    return prompt.cost(worker) + worker.queued_prefill_tokens + busy + no_room
