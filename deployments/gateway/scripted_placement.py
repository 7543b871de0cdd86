"""Where requests would go among workers that exist in name only; the comparison itself is the real one."""

from cluster.explanation import PlacementExplanation, explain
from cluster.placement import Placement, PlacementRules
from cluster.policies import PlacementDemand
from cluster.pools import PoolSpec
from cluster.snapshot import Snapshot, WorkerFacts, WorkerLoad

_POOLS = (PoolSpec(name="prefill", role="prefill"), PoolSpec(name="decode", role="decode"))
_ROOM_TOKENS = 2**20
_LOADS = {
    "prefill-1": WorkerLoad(free_tokens=_ROOM_TOKENS, total_tokens=_ROOM_TOKENS),
    "prefill-2": WorkerLoad(queued_prefill_tokens=1000, waiting=1, free_tokens=_ROOM_TOKENS, total_tokens=_ROOM_TOKENS),
    "decode-1": WorkerLoad(running=4, context_tokens=2000, free_tokens=_ROOM_TOKENS, total_tokens=_ROOM_TOKENS),
    "decode-2": WorkerLoad(free_tokens=_ROOM_TOKENS, total_tokens=_ROOM_TOKENS),
}


def explain_scripted(prompt_tokens: int) -> PlacementExplanation:
    """Place a request between two prefill workers, the second busy, and two decode workers, the first busy."""
    snapshot = Snapshot(_POOLS)
    for worker_id, load in _LOADS.items():
        pool = worker_id.partition("-")[0]
        snapshot.update(WorkerFacts(worker_id=worker_id, incarnation="scripted", pool=pool), load)
    demand = PlacementDemand(prompt_tokens=prompt_tokens)
    placement = Placement(snapshot, demand, snapshot.matched_tokens({}), PlacementRules())
    everybody = snapshot.all_but()
    ranking = placement.rank_decode(everybody)
    plan = placement.plan_prefill(ranking.rows[0], everybody)
    return explain(placement, (ranking, everybody), ranking.rows[0], (plan, everybody))
