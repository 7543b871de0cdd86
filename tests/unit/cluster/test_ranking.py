from dataclasses import replace

import pytest

from cluster.policies import PolicyName
from messages.reservations import Admitted, Need
from tests.unit.cluster.placing import D1, P1, RULES, TOKENS, Worker, placement


def test_candidates_carry_what_pending_load_adds() -> None:
    admitted = (Admitted(issuer="x", through=7),)
    busy = D1.with_load(running=4, context_tokens=400, free_tokens=900, admitted=admitted)
    made = placement(1000, P1, replace(busy, cached=960))

    candidate = made.rank_decode(made.snapshot.all_but()).candidates[0]

    assert (candidate.worker_id, candidate.incarnation, candidate.admitted) == ("d1", "i", admitted)
    assert candidate.room_tokens == 900 + 960
    assert candidate.cost_per_token > 1.0
    # 128 tokens of a request with about 1,064 tokens of context, for itself and for what it holds up.
    assert candidate.cost_per_request == pytest.approx(2 * 128 * (2.0 + 0.001 * 1064))


def test_a_request_needs_its_prompt_and_its_likely_output_and_computes_what_is_left() -> None:
    made = placement(1000, P1, replace(D1, cached=960), output_tokens=4096)

    assert made.need(prefills_at=1, decodes=True) == Need(prefill_tokens=40, kv_tokens=1000 + 128)
    assert made.need(decodes=True) == Need(prefill_tokens=0, kv_tokens=1128)
    assert made.need(prefills_at=0) == Need(prefill_tokens=1000, kv_tokens=1000)


def test_a_ranking_has_the_cheapest_few_in_order() -> None:
    workers = [Worker(worker_id=f"d{number}", pool="decode").with_load(running=number) for number in range(40)]
    made = placement(100, *workers, rules=replace(TOKENS, num_candidates=5))

    candidates = made.rank_decode(made.snapshot.all_but()).candidates

    assert [each.worker_id for each in candidates] == ["d0", "d1", "d2", "d3", "d4"]
    costs = [each.cost for each in candidates]
    assert costs == sorted(costs)


@pytest.mark.parametrize("policy", ["predicted_latency", "least_loaded"])
def test_equals_are_candidates_of_different_requests(policy: PolicyName) -> None:
    """100 idle workers, 16 candidates: nobody is left out or always first, even where all cost nothing."""
    workers = [Worker(worker_id=f"d{number}", pool="decode") for number in range(100)]

    made = [placement(100, *workers, rules=replace(RULES, policy=policy), seed=seed) for seed in range(50)]
    rankings = [each.rank_decode(each.snapshot.all_but()).rows for each in made]

    assert all(len(set(rows)) == 16 for rows in rankings)
    assert set().union(*rankings) == set(range(100))
    assert len({rows[0] for rows in rankings}) > 30


def test_a_clearly_better_worker_is_a_candidate_of_every_request() -> None:
    workers = [Worker(worker_id=f"d{number}", pool="decode").with_load(running=8) for number in range(100)]
    workers[57] = workers[57].with_load(running=7)

    for seed in range(50):
        made = placement(100, *workers, seed=seed)
        assert made.rank_decode(made.snapshot.all_but()).rows[0] == 57


def test_a_placement_is_over_when_workers_have_joined_or_left() -> None:
    made = placement(100, P1, D1)
    assert made.is_current

    made.snapshot.remove("p1")

    assert not made.is_current
    with pytest.raises(AssertionError, match="joined or left"):
        made.rank_decode(made.snapshot.all_but())
