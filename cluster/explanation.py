"""Why a request went where it went: every candidate with its costs and what they are made of."""

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.placement import LocalReason, Placement, PrefillPlan, Ranking, RemoteReason
from cluster.policies import PolicyName, Stage
from cluster.snapshot import Bools


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateScore:
    """One worker as a policy saw it."""

    worker_id: str
    pool: str
    is_allowed: bool
    """Whether pools, roles and exclusions let it be chosen."""
    rank: int | None
    """Place among the candidates, from 0; None: not one of them."""
    cost: float
    """Lacking room included, pending load not."""
    matched_tokens: int
    """Leading prompt tokens that it holds."""
    remaining_tokens: int
    """Prompt tokens that it would compute, after what it fetches."""
    parts: Mapping[str, float]
    """What its cost is made of; names with their unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageExplanation:
    """One comparison of workers."""

    stage: Stage
    policy: PolicyName
    candidates: tuple[CandidateScore, ...]
    """Cheapest first, those that could not be chosen last."""

    @property
    def chosen(self) -> CandidateScore | None:
        """The one that ranks first, as long as the ledger knows of nothing pending; None: nobody was needed."""
        return next((each for each in self.candidates if each.rank == 0), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementExplanation:
    """A whole decision."""

    decode: StageExplanation
    prefill: StageExplanation | None
    """None: the decode worker computes the prompt, and nobody else was asked."""
    reason: LocalReason | RemoteReason
    """Of the prefill plan."""
    local_ms: float | None
    remote_ms: float | None
    """Predicted for the two places, where they were compared."""


def explain_stage(
    placement: Placement,
    stage: Stage,
    allowed: Bools,
    ranking: Ranking | None,
    decode_row: int | None = None,
) -> StageExplanation:
    """Say what the policy said of every worker; scores are computed again, so nothing is kept for it otherwise.

    Args:
        placement: The request, before anything has changed its snapshot.
        stage: Which comparison.
        allowed: The mask that was given to it.
        ranking: What came of it; None: it was not needed.
        decode_row: At stage prefill: the chosen decode worker.
    """
    snapshot = placement.snapshot
    scores = placement.scores(stage, decode_row)
    cost = placement.total_cost(scores, placement.need(decodes=stage == "decode"))
    parts = {**scores.parts, "lacking_room": cost - scores.cost}
    able = allowed & placement.able(stage, decode_row)
    ranks = {row: rank for rank, row in enumerate(ranking.rows)} if ranking is not None else {}
    candidates = [
        CandidateScore(
            worker_id=worker_id,
            pool=snapshot.pools[snapshot.columns.pool[row]].name,
            is_allowed=bool(able[row]),
            rank=ranks.get(row),
            cost=float(cost[row]),
            matched_tokens=int(placement.matched_tokens[row]),
            remaining_tokens=int(placement.remaining_tokens[row]),
            parts={name: float(values[row]) for name, values in parts.items()},
        )
        for row, worker_id in enumerate(snapshot.worker_ids)
    ]
    candidates.sort(key=lambda each: (not each.is_allowed, each.cost, each.worker_id))
    return StageExplanation(stage=stage, policy=placement.policy, candidates=tuple(candidates))


def explain(
    placement: Placement,
    decode: tuple[Ranking, Bools],
    decode_row: int,
    prefill: tuple[PrefillPlan, Bools],
) -> PlacementExplanation:
    """Explain a decision that was made.

    Args:
        placement: The request, before anything has changed its snapshot.
        decode: The ranking of decode workers, and the mask that was given to it.
        decode_row: Which of them was chosen.
        prefill: The plan for the prompt, and the mask that was given to it.
    """
    (ranking, may_decode), (plan, may_prefill) = decode, prefill
    was_compared = plan.ranking is not None or plan.remote_ms is not None
    return PlacementExplanation(
        decode=explain_stage(placement, "decode", may_decode, ranking),
        prefill=explain_stage(placement, "prefill", may_prefill, plan.ranking, decode_row) if was_compared else None,
        reason=plan.reason,
        local_ms=plan.local_ms,
        remote_ms=plan.remote_ms,
    )
