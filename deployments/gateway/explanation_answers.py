"""An explanation for a client: a message of kvferry.v1, and the same in JSON."""

from cluster.explanation import CandidateScore, StageExplanation
from cluster.placement import LocalReason, RemoteReason
from deployments.service import Explanation
from kvferry.v1 import inference_pb2 as v1

_REASONS: dict[LocalReason | RemoteReason, v1.PrefillReason.ValueType] = {
    "few_tokens": v1.PREFILL_REASON_FEW_TOKENS,
    "sooner_here": v1.PREFILL_REASON_SOONER_HERE,
    "no_prefill_worker": v1.PREFILL_REASON_NO_PREFILL_WORKER,
    "sooner_there": v1.PREFILL_REASON_SOONER_THERE,
    "refused_here": v1.PREFILL_REASON_REFUSED_HERE,
}


def explanation_message(explanation: Explanation) -> v1.Explanation:
    """An explanation for the wire."""
    placement = explanation.placement
    return v1.Explanation(
        prompt_tokens=explanation.prompt_tokens,
        decode=_stage_message(placement.decode),
        prefill=None if placement.prefill is None else _stage_message(placement.prefill),
        decode_worker=_chosen(placement.decode) or "",
        prefill_worker=_chosen(placement.prefill),
        reason=_REASONS[placement.reason],
        local_ms=placement.local_ms,
        remote_ms=placement.remote_ms,
    )


def explanation_object(explanation: Explanation) -> dict[str, object]:
    """An explanation as JSON, with the same names as in the message."""
    placement = explanation.placement
    return {
        "prompt_tokens": explanation.prompt_tokens,
        "decode_worker": _chosen(placement.decode),
        "prefill_worker": _chosen(placement.prefill),
        "reason": placement.reason,
        "local_ms": placement.local_ms,
        "remote_ms": placement.remote_ms,
        "decode": _stage_object(placement.decode),
        "prefill": None if placement.prefill is None else _stage_object(placement.prefill),
    }


def _chosen(stage: StageExplanation | None) -> str | None:
    chosen = None if stage is None else stage.chosen
    return None if chosen is None else chosen.worker_id


def _stage_message(stage: StageExplanation) -> v1.StageExplanation:
    return v1.StageExplanation(policy=stage.policy, candidates=map(_candidate_message, stage.candidates))


def _candidate_message(candidate: CandidateScore) -> v1.CandidateScore:
    return v1.CandidateScore(
        worker=candidate.worker_id,
        pool=candidate.pool,
        is_allowed=candidate.is_allowed,
        rank=candidate.rank,
        cost=candidate.cost,
        matched_tokens=candidate.matched_tokens,
        remaining_tokens=candidate.remaining_tokens,
        parts=[v1.CostPart(name=name, value=value) for name, value in candidate.parts.items()],
    )


def _stage_object(stage: StageExplanation) -> dict[str, object]:
    return {"policy": stage.policy, "candidates": [_candidate_object(each) for each in stage.candidates]}


def _candidate_object(candidate: CandidateScore) -> dict[str, object]:
    return {
        "worker": candidate.worker_id,
        "pool": candidate.pool,
        "is_allowed": candidate.is_allowed,
        "rank": candidate.rank,
        "cost": candidate.cost,
        "matched_tokens": candidate.matched_tokens,
        "remaining_tokens": candidate.remaining_tokens,
        "parts": dict(candidate.parts),
    }
