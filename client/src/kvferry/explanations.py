"""Where a request would run, and why: every worker that was compared, with its cost and what that is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvferry.v1 import inference_pb2 as v1

if TYPE_CHECKING:
    from collections.abc import Mapping

PrefillReason = Literal["few_tokens", "sooner_here", "no_prefill_worker", "sooner_there", "refused_here", "unknown"]
"""On the decode worker: `few_tokens` are uncached there; `sooner_here`, as predicted; `no_prefill_worker` may compute
it now. On another one: `sooner_there`, as predicted; `refused_here` by the decode worker. `unknown`: a newer one.

Where times were predicted, the usual place is kept unless another one is clearly sooner; usual is the decode worker
itself if it is of a unified pool, else a prefill worker."""

_REASONS: dict[int, PrefillReason] = {
    v1.PREFILL_REASON_FEW_TOKENS: "few_tokens",
    v1.PREFILL_REASON_SOONER_HERE: "sooner_here",
    v1.PREFILL_REASON_NO_PREFILL_WORKER: "no_prefill_worker",
    v1.PREFILL_REASON_SOONER_THERE: "sooner_there",
    v1.PREFILL_REASON_REFUSED_HERE: "refused_here",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateScore:
    """One worker as the policy saw it."""

    worker: str
    pool: str
    is_allowed: bool
    """Whether role, pool and load let it be chosen."""
    rank: int | None
    """Place among those that would be chosen from, 0 is the best; None: it is not one of them."""
    cost: float
    """The less the better; what lacking room for KV costs is in it."""
    matched_tokens: int
    """Leading prompt tokens whose KV it holds."""
    remaining_tokens: int
    """Prompt tokens that it would compute, after what it fetches from others."""
    parts: Mapping[str, float]
    """What the cost is made of, by names that end with their unit; with most policies it is their sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageExplanation:
    """One comparison of workers."""

    policy: str
    """Name of the policy that gave the costs, which also decides their unit."""
    candidates: tuple[CandidateScore, ...]
    """Every worker, cheapest first, those that cannot be chosen last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A decision about one request, as the gateway that was asked sees the workers; load can change it any moment."""

    prompt_tokens: int
    decode_worker: str
    """The one that would generate."""
    prefill_worker: str | None
    """The one that would compute the prompt; None: the decode worker itself."""
    reason: PrefillReason
    """Why the prompt would be computed there."""
    local_ms: float | None
    """Predicted time to the first token with the prompt computed on the decode worker, what it delays others included;
    None: it was not needed to decide."""
    remote_ms: float | None
    """The same with the best prefill worker, hand-off included."""
    decode: StageExplanation
    """Comparison of the workers that decode."""
    prefill: StageExplanation | None
    """Comparison of the workers that compute prompts for others; None: there was none."""


def explanation_of(message: v1.Explanation) -> Explanation:
    """What a gateway has answered."""
    return Explanation(
        prompt_tokens=message.prompt_tokens,
        decode_worker=message.decode_worker,
        prefill_worker=message.prefill_worker if message.HasField("prefill_worker") else None,
        reason=_REASONS.get(message.reason, "unknown"),
        local_ms=message.local_ms if message.HasField("local_ms") else None,
        remote_ms=message.remote_ms if message.HasField("remote_ms") else None,
        decode=_stage_of(message.decode),
        prefill=_stage_of(message.prefill) if message.HasField("prefill") else None,
    )


def _stage_of(message: v1.StageExplanation) -> StageExplanation:
    return StageExplanation(policy=message.policy, candidates=tuple(map(_candidate_of, message.candidates)))


def _candidate_of(message: v1.CandidateScore) -> CandidateScore:
    return CandidateScore(
        worker=message.worker,
        pool=message.pool,
        is_allowed=message.is_allowed,
        rank=message.rank if message.HasField("rank") else None,
        cost=message.cost,
        matched_tokens=message.matched_tokens,
        remaining_tokens=message.remaining_tokens,
        parts={part.name: part.value for part in message.parts},
    )
