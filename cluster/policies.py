"""What placing a request on each worker would cost, in six ways behind one signature.

A policy sees the whole snapshot and gives every row a cost, the less the better, and what would add to it: pending
tokens, pending requests, lacking room. Costs of different policies have different units and are never compared. No cost
jumps: one token more or less changes it by about what a token is worth, so locality gives way to load gradually.

Sources: `lmetric` is LMetric, Zhang et al. 2026 (arXiv:2603.15202); `dynamo_cost` is the router cost of NVIDIA Dynamo;
`cache_aware` follows the SGLang gateway's policy of that name, with a continuous trade for its thresholds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from cluster.prediction import (
    PromptTimes,
    handoff_ms,
    lacking_token_ms,
    prompt_times,
    queued_delay_ms,
    token_ms,
    transfer_ms,
)
from cluster.snapshot import Floats, Ints, Snapshot

PolicyName = Literal["predicted_latency", "lmetric", "dynamo_cost", "cache_aware", "least_loaded", "round_robin"]
Stage = Literal["decode", "prefill"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementDemand:
    """What one request needs."""

    prompt_tokens: int
    output_tokens: int = 128
    """Tokens that it may generate."""
    stage: Stage = "decode"
    """For which of its two workers rows are compared."""
    transfer_ms: float = 0.0
    """At stage prefill: time that the decode worker needs to read what it lacks of the prompt."""
    work_tokens: Floats | None = None
    """Prompt tokens that each row would compute, (n,), fetching counted as computing; None: all that it lacks."""
    times: PromptTimes | None = None
    """What is predicted for the prompt on each row, where that is known already."""
    seed: int = 0
    """Which of equals come first; different for different requests, so that these do not all choose the same."""

    def work(self, matched_tokens: Ints) -> Floats:
        """Prompt tokens to compute by row, (n,); the last one always."""
        return np.maximum(self.prompt_tokens - matched_tokens, 1.0) if self.work_tokens is None else self.work_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRules:
    """The configured side of a cost."""

    horizon_tokens: int = 128
    """At most so many generated tokens count for a request's latency: how long it runs is not known."""
    delay_weight: float = 1.0
    """What a millisecond weighs by which somebody else's token is late, beside one of the request's own."""
    running_cost_tokens: int = 32
    """cache_aware, least_loaded: what one request that is there weighs, in prompt tokens."""
    lacking_room_weight: float = 4.0
    """cache_aware, least_loaded: what a token of KV without room weighs, in prompt tokens."""
    overlap_weight: float = 1.0
    """dynamo_cost: what a block to prefill weighs beside a block that decodes."""
    block_size: int = 32
    """dynamo_cost: tokens per block."""

    def horizon(self, demand: PlacementDemand) -> int:
        """Generated tokens of a request that count."""
        return min(demand.output_tokens, self.horizon_tokens)


@dataclass(frozen=True, slots=True)
class Scores:
    """Of every row, whether it may be chosen or not; arrays are (n,). What is pending is for the ledger to add."""

    cost: Floats
    """Without what lacking room costs."""
    per_token: Floats
    """What each pending prompt token adds."""
    per_request: Floats
    """What each pending request adds, taken to be like this one."""
    per_lacking_token: Floats
    """What each token of KV without room adds."""
    parts: Mapping[str, Floats] = field(default_factory=dict)
    """What the cost is made of, by name."""


Policy = Callable[[Snapshot, PlacementDemand, Ints, PolicyRules], Scores]
"""Arguments: the workers, the request, leading tokens of its prompt that each row holds, (n,), what is configured."""


def predicted_latency(snapshot: Snapshot, demand: PlacementDemand, matched_tokens: Ints, rules: PolicyRules) -> Scores:
    """Milliseconds: the request's own, and those by which it makes others late.

    A prefill row costs the time to token 1 and what shows of the hand-off. A decode row costs the slower tokens, the
    wait for room, and token 1: its own where the worker would compute the prompt itself, else the best prefill row's
    with a hand-off, whichever is less.
    """
    columns = snapshot.columns
    times = demand.times
    if times is None:
        times = prompt_times(columns, demand.prompt_tokens, demand.work(matched_tokens))
    per_token = columns.queued_token_ms
    if demand.stage == "prefill":
        handoff = handoff_ms(demand.transfer_ms, times.compute_ms, times.last_chunk)
        parts = {"queue_ms": columns.queue_ms, "compute_ms": times.compute_ms, "handoff_ms": handoff}
        return Scores(times.ttft_ms + handoff, per_token, columns.step_ms, per_token, parts)
    victims = rules.delay_weight * columns.decoding
    here = times.ttft_ms + victims * times.delay_ms
    horizon = rules.horizon(demand)
    # What is queued on the row as well holds up the tokens after the first.
    there = _elsewhere_ms(snapshot, times, demand.prompt_tokens - matched_tokens) + queued_delay_ms(
        columns, horizon - 1
    )
    first = np.minimum(here, there)
    extra = horizon * token_ms(columns, demand.prompt_tokens + 0.5 * horizon)
    own = horizon * columns.step_ms + extra
    others = victims * extra
    # A pending request makes this one's tokens late, and has its own made late by it.
    per_request = (1.0 + rules.delay_weight) * extra
    parts = {"first_token_ms": first, "tokens_ms": own, "others_ms": others}
    return Scores(first + own + others, per_token, per_request, lacking_token_ms(columns, own), parts)


def lmetric(snapshot: Snapshot, demand: PlacementDemand, matched_tokens: Ints, _rules: PolicyRules) -> Scores:
    """Prompt tokens to compute if the request came, its own and those queued, times requests, itself included."""
    columns = snapshot.columns
    prefill = columns.queued_prefill_tokens + demand.work(matched_tokens)
    batch = columns.running + columns.waiting + 1.0
    return Scores(prefill * batch, batch, prefill, batch, {"prefill_tokens": prefill, "batch_size": batch})


def dynamo_cost(snapshot: Snapshot, demand: PlacementDemand, matched_tokens: Ints, rules: PolicyRules) -> Scores:
    """Blocks: weighted ones to prefill and, except at stage prefill, those that would be active for decoding."""
    columns = snapshot.columns
    is_decode = float(demand.stage == "decode")
    new = demand.work(matched_tokens) / rules.block_size
    prefill = columns.queued_prefill_tokens / rules.block_size + new
    decode = is_decode * (columns.context_tokens / rules.block_size + new)
    per_token = np.full(len(snapshot), rules.overlap_weight / rules.block_size)
    parts = {"prefill_blocks": prefill, "decode_blocks": decode}
    return Scores(rules.overlap_weight * prefill + decode, per_token, is_decode * new, per_token, parts)


def cache_aware(snapshot: Snapshot, demand: PlacementDemand, matched_tokens: Ints, rules: PolicyRules) -> Scores:
    """Prompt tokens: uncached ones, queued ones, and what each request weighs."""
    uncached = demand.work(matched_tokens)
    return _add_load(snapshot, rules, uncached, {"uncached_tokens": uncached})


def least_loaded(snapshot: Snapshot, _demand: PlacementDemand, matched_tokens: Ints, rules: PolicyRules) -> Scores:
    """The same without regard to what is cached where."""
    return _add_load(snapshot, rules, np.zeros(len(matched_tokens)), {})


def round_robin(snapshot: Snapshot, _demand: PlacementDemand, _matched: Ints, _rules: PolicyRules) -> Scores:
    """Number of the row's last turn: who has not been chosen for longest is next, whatever the load.

    The turns are in the snapshot (`Snapshot.note_choice`), so masks may differ from one decision to the next.
    """
    turn = snapshot.columns.last_turn.astype(np.float64)
    nothing = np.zeros(len(snapshot))
    return Scores(turn, nothing, nothing, nothing, {"last_turn": turn})


POLICIES: Mapping[PolicyName, Policy] = {
    "predicted_latency": predicted_latency,
    "lmetric": lmetric,
    "dynamo_cost": dynamo_cost,
    "cache_aware": cache_aware,
    "least_loaded": least_loaded,
    "round_robin": round_robin,
}


def _add_load(snapshot: Snapshot, rules: PolicyRules, cost: Floats, parts: Mapping[str, Floats]) -> Scores:
    columns = snapshot.columns
    requests = rules.running_cost_tokens * (columns.running + columns.waiting)
    ones = np.ones(len(snapshot))
    return Scores(
        cost + columns.queued_prefill_tokens + requests,
        ones,
        rules.running_cost_tokens * ones,
        rules.lacking_room_weight * ones,
        {**parts, "queued_tokens": columns.queued_prefill_tokens, "request_tokens": requests},
    )


def _elsewhere_ms(snapshot: Snapshot, times: PromptTimes, lacking_tokens: Ints) -> Floats:
    """Token 1 from the best row that only prefills, and a hand-off to each row, (n,); infinite without such a row."""
    columns = snapshot.columns
    ttft = np.where(columns.only_prefills, times.ttft_ms, np.inf)
    best = int(ttft.argmin())
    handoff = handoff_ms(transfer_ms(snapshot, lacking_tokens), times.compute_ms[best], times.last_chunk[best])
    return float(ttft[best]) + handoff
