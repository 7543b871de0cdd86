from dataclasses import replace

import pytest

from cluster.explanation import PlacementExplanation, explain
from cluster.placement import Placement, PlacementRules
from cluster.policies import POLICIES, PlacementDemand, PolicyName
from cluster.pools import PoolSpec
from cluster.snapshot import Snapshot, WorkerFacts, WorkerLoad

POOLS = (PoolSpec(name="prefill", role="prefill"), PoolSpec(name="decode", role="decode"))
IDLE = WorkerLoad(free_tokens=100_000, total_tokens=100_000)


def explained(
    prompt_tokens: int, cached: dict[str, int] | None = None, policy: PolicyName = "predicted_latency"
) -> PlacementExplanation:
    """Of two prefill and two decode workers; d2 is excluded."""
    snapshot = Snapshot(POOLS)
    for worker_id, pool, load in (
        ("p1", "prefill", replace(IDLE, queued_prefill_tokens=700)),
        ("p2", "prefill", IDLE),
        ("d1", "decode", replace(IDLE, running=3, context_tokens=900)),
        ("d2", "decode", IDLE),
    ):
        snapshot.update(WorkerFacts(worker_id=worker_id, incarnation="i", pool=pool), load)
    rules = PlacementRules(policy=policy)
    matched = snapshot.matched_tokens(cached or {})
    placement = Placement(snapshot, PlacementDemand(prompt_tokens=prompt_tokens), matched, rules)
    allowed = snapshot.all_but({"d2"})
    ranking = placement.rank_decode(allowed)
    plan = placement.plan_prefill(ranking.rows[0], allowed)
    return explain(placement, (ranking, allowed), ranking.rows[0], (plan, allowed))


def test_every_worker_is_listed_the_chosen_one_first_and_the_impossible_ones_last() -> None:
    found = explained(1000)

    assert [each.worker_id for each in found.decode.candidates[:1]] == ["d1"]
    assert [each.is_allowed for each in found.decode.candidates] == [True, False, False, False]
    assert found.prefill is not None
    assert [(each.worker_id, each.rank) for each in found.prefill.candidates[:2]] == [("p2", 0), ("p1", 1)]


def test_the_reason_and_both_predictions_are_there() -> None:
    found = explained(1000)

    assert found.reason == "sooner_there"
    assert found.local_ms is not None
    assert found.remote_ms is not None


def test_a_short_prompt_was_compared_with_nobody() -> None:
    found = explained(1000, {"d1": 990})

    assert (found.reason, found.prefill, found.local_ms) == ("few_tokens", None, None)
    warm = found.decode.candidates[0]
    assert (warm.matched_tokens, warm.remaining_tokens) == (990, 10)


@pytest.mark.parametrize("policy", ["predicted_latency", "cache_aware", "least_loaded"])
def test_the_parts_of_a_sum_add_up_to_the_cost(policy: PolicyName) -> None:
    for candidate in explained(1000, policy=policy).decode.candidates:
        if candidate.is_allowed:
            assert sum(candidate.parts.values()) == pytest.approx(candidate.cost)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_names_what_its_cost_is_made_of(policy: PolicyName) -> None:
    found = explained(1000, policy=policy)

    assert found.decode.policy == policy
    assert all(len(candidate.parts) > 1 for candidate in found.decode.candidates)
