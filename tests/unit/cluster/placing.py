"""Small clusters for placement tests, and what is decided in them."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from cluster.placement import Placement, PlacementRules, PrefillPlan
from cluster.policies import PlacementDemand
from cluster.pools import PoolSpec
from cluster.reuse import ReusePlan
from cluster.snapshot import Snapshot, WorkerFacts, WorkerLoad
from cluster.step_time import StepTimes

POOLS = (
    PoolSpec(name="prefill", role="prefill"),
    PoolSpec(name="decode", role="decode"),
    PoolSpec(name="both", role="unified"),
)
TIMES = StepTimes(base_ms=10.0, prefill_token_ms=1.0, decode_token_ms=2.0, context_token_ms=0.001)
IDLE = WorkerLoad(free_tokens=200_000, total_tokens=200_000, times=TIMES)
RULES = PlacementRules(local_prefill_max_tokens=256)
TOKENS = replace(RULES, policy="cache_aware")
"""Costs are prompt tokens, as easy to check as they are exact."""


@dataclass(frozen=True, kw_only=True)
class Worker:
    worker_id: str
    pool: str
    load: WorkerLoad = IDLE
    fingerprint: str = ""
    cached: int = 0

    def with_load(self, **fields: object) -> "Worker":
        return replace(self, load=replace(self.load, **fields))


@dataclass(frozen=True, kw_only=True)
class Placed:
    decode: str
    prefill: str | None
    plan: PrefillPlan
    reuse: ReusePlan
    remaining: int
    """Tokens to compute where the prompt is computed."""


P1, P2 = Worker(worker_id="p1", pool="prefill"), Worker(worker_id="p2", pool="prefill")
D1, D2 = Worker(worker_id="d1", pool="decode"), Worker(worker_id="d2", pool="decode")
U1, U2 = Worker(worker_id="u1", pool="both"), Worker(worker_id="u2", pool="both")


def placement(
    prompt_tokens: int, *workers: Worker, rules: PlacementRules = RULES, output_tokens: int = 128, seed: int = 0
) -> Placement:
    snapshot = Snapshot(POOLS, rules.reuse)
    for worker in workers:
        facts = WorkerFacts(
            worker_id=worker.worker_id, incarnation="i", pool=worker.pool, fingerprint=worker.fingerprint
        )
        snapshot.update(facts, worker.load)
    demand = PlacementDemand(prompt_tokens=prompt_tokens, output_tokens=output_tokens, seed=seed)
    matched = snapshot.matched_tokens({worker.worker_id: worker.cached for worker in workers})
    return Placement(snapshot, demand, matched, rules)


def place(
    prompt_tokens: int,
    *workers: Worker,
    rules: PlacementRules = RULES,
    force_remote: bool = False,
    exclude: Collection[str] = (),
) -> Placed:
    """The first choice of both stages."""
    made = placement(prompt_tokens, *workers, rules=rules)
    allowed = made.snapshot.all_but(exclude)
    decode_row = made.rank_decode(allowed).rows[0]
    plan = made.plan_prefill(decode_row, allowed, force_remote=force_remote)
    row = decode_row if plan.ranking is None else plan.ranking.rows[0]
    ids = made.snapshot.worker_ids
    return Placed(
        decode=ids[decode_row],
        prefill=None if plan.is_local else ids[row],
        plan=plan,
        reuse=made.plan_reuse(row),
        remaining=int(made.remaining_tokens[row]),
    )
