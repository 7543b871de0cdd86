from dataclasses import replace

import pytest

from cluster.placement import PlacementRules
from cluster.policies import PolicyName
from cluster.reuse import GroupBytes, ReuseRules, WorkerRates
from cluster.step_time import StepTimes
from messages.errors import Unavailable
from tests.unit.cluster.placing import D1, D2, P1, P2, RULES, TIMES, TOKENS, U1, U2, Placed, Worker, place, placement


@pytest.mark.parametrize(("prompt_tokens", "prefill"), [(1, None), (255, None), (256, None), (257, "p1")])
@pytest.mark.parametrize("policy", ["predicted_latency", "cache_aware", "lmetric", "dynamo_cost"])
def test_the_threshold_between_local_and_remote_is_strict(
    prompt_tokens: int, prefill: str | None, policy: PolicyName
) -> None:
    """Case 65, rule 15."""
    assert place(prompt_tokens, P1, D1, rules=replace(RULES, policy=policy)).prefill == prefill


@pytest.mark.parametrize(
    ("cached", "prefill", "remaining"),
    [(0, "p1", 20_000), (19_500, None, 500), (19_744, None, 256), (20_000, None, 1)],
)
def test_what_decode_has_cached_decides_not_the_length_of_the_prompt(
    cached: int, prefill: str | None, remaining: int
) -> None:
    """Case 64."""
    placed = place(20_000, P1, replace(D1, cached=cached))

    assert (placed.prefill, placed.remaining) == (prefill, remaining)


@pytest.mark.parametrize(("cached", "prefill"), [(19_744, None), (19_743, "p1")])
def test_the_threshold_counts_what_is_uncached_on_the_decode_worker(cached: int, prefill: str | None) -> None:
    """Case 65, when the prefill worker has as much of the prompt."""
    assert place(20_000, replace(P1, cached=cached), replace(D1, cached=cached)).prefill == prefill


def test_remaining_tokens_are_known_per_worker_before_anything_is_chosen() -> None:
    """Case 64: pools go by what is left there: 500 tokens on the warm prefill worker, 20,000 on the cold one."""
    made = placement(20_000, replace(P1, cached=19_500), P2, D1)

    assert made.remaining_tokens.tolist() == [500, 20_000, 20_000]


def test_a_decode_worker_is_limited_to_what_the_decision_was_based_on_and_a_unified_one_is_not() -> None:
    assert place(20, P1, D1).plan.max_uncached_tokens == 256
    assert place(20, P1, U1).plan.max_uncached_tokens is None


def test_a_unified_pool_alone_serves_prompts_of_any_length() -> None:
    placed = place(20_000, U1)

    assert (placed.decode, placed.prefill, placed.plan.reason) == ("u1", None, "no_prefill_worker")


def test_unified_workers_keep_their_prefills() -> None:
    assert place(20_000, U1.with_load(running=9), U2).prefill is None


def test_a_refused_local_prefill_goes_remote() -> None:
    placed = place(20, P1, D1, force_remote=True)

    assert (placed.prefill, placed.plan.reason) == ("p1", "refused_here")


def test_a_refused_local_prefill_stays_on_a_unified_worker_when_nobody_else_prefills() -> None:
    plan = place(20, U1, force_remote=True).plan

    assert (plan.is_local, plan.max_uncached_tokens) == (True, None)


def test_excluded_workers_are_chosen_for_nothing() -> None:
    placed = place(1000, P1, P2, D1, D2, exclude={"p1", "d1"})

    assert (placed.decode, placed.prefill) == ("d2", "p2")


@pytest.mark.parametrize(("workers", "reason"), [((), "decode"), ((P1, P2), "decode"), ((D1,), "prefill")])
def test_without_the_needed_workers_the_request_is_refused_at_once(workers: tuple[Worker, ...], reason: str) -> None:
    """Rule 17: 503, never a hang."""
    with pytest.raises(Unavailable, match=reason):
        place(1000, *workers)


def test_a_pool_that_is_closed_to_a_request_gives_no_candidate() -> None:
    made = placement(1000, P1, P2, D1)

    plan = made.plan_prefill(2, made.snapshot.all_but({"p2"}))

    assert plan.ranking is not None
    assert [each.worker_id for each in plan.ranking.candidates] == ["p1"]


def test_blocks_go_only_to_a_worker_that_reads_the_same_layout() -> None:
    """Rule 13."""
    other = replace(P1, fingerprint="another")

    assert place(1000, other, P2.with_load(queued_prefill_tokens=50), D1).prefill == "p2"
    with pytest.raises(Unavailable, match="prefill"):
        place(1000, other, D1)


# Decode: room and load against what is cached.


def test_decode_goes_where_the_prefix_is_unless_that_worker_is_too_busy() -> None:
    """Rule 18."""
    warm = replace(D2, cached=960)

    assert place(1000, P1, D1, warm, rules=TOKENS).decode == "d2"
    assert place(1000, P1, D1, warm.with_load(running=29), rules=TOKENS).decode == "d2"
    assert place(1000, P1, D1, warm.with_load(running=31), rules=TOKENS).decode == "d1"


@pytest.mark.parametrize("rules", [RULES, TOKENS])
def test_decode_goes_where_room_is(rules: PlacementRules) -> None:
    full = D1.with_load(total_tokens=10_000, free_tokens=1000, running=9, context_tokens=9_000)
    roomy = D2.with_load(queued_prefill_tokens=100, running=9, context_tokens=9_000)

    assert place(800, P1, full, roomy, rules=rules).decode == "d1"
    assert place(2000, P1, full, roomy, rules=rules).decode == "d2"


def test_a_prompt_never_goes_where_it_can_never_fit() -> None:
    small = D1.with_load(total_tokens=4000, free_tokens=4000)

    assert place(5000, P1, small, D2.with_load(running=60)).decode == "d2"
    # Where it fits nowhere the worker says so, to the client.
    assert place(5000, P1, small).decode == "d1"


def test_decode_goes_where_fewer_streams_would_be_held_up() -> None:
    busy = D1.with_load(running=8, context_tokens=8000)

    assert place(1000, P1, busy, D2).decode == "d2"


def test_a_slower_machine_gets_less() -> None:
    slow = StepTimes(base_ms=40.0, prefill_token_ms=4.0, decode_token_ms=8.0, context_token_ms=0.004)

    assert place(1000, P1, D1.with_load(times=slow), D2.with_load(running=2, context_tokens=500)).decode == "d2"


# Local or remote above the threshold.


def test_an_idle_decode_worker_helps_out_when_the_prefill_queue_is_long() -> None:
    """5,000 queued tokens take over 5 s; 1,000 tokens here take 1."""
    plan = place(1000, P1.with_load(queued_prefill_tokens=5000), D1).plan

    assert (plan.is_local, plan.reason, plan.max_uncached_tokens) == (True, "sooner_here", 1000)
    assert plan.local_ms is not None
    assert plan.remote_ms is not None
    assert plan.local_ms * 1.25 + 50 < plan.remote_ms


def test_a_decode_worker_never_helps_out_where_it_must_not() -> None:
    rules = replace(RULES, prefills_on_decode=False)

    plan = place(1000, P1.with_load(queued_prefill_tokens=5000), D1, rules=rules).plan

    assert (plan.is_local, plan.reason) == (False, "sooner_there")


def test_a_decode_worker_with_streams_does_not_hold_them_up_for_it() -> None:
    """The same, but 8 streams would each be a second late."""
    busy = D1.with_load(running=8, context_tokens=4000)

    assert place(1000, P1.with_load(queued_prefill_tokens=5000), busy).prefill == "p1"


def test_a_small_advantage_does_not_move_the_prefill_to_the_decode_worker() -> None:
    """Hysteresis: local must be a quarter and 50 ms better."""
    assert place(1000, P1.with_load(queued_prefill_tokens=100), D1).prefill == "p1"
    assert place(1000, P1.with_load(queued_prefill_tokens=500), D1).prefill is None


def test_a_unified_worker_computes_its_own_prompts_unless_that_is_clearly_later() -> None:
    assert place(1000, P1, U1).prefill is None
    assert place(1000, P1, U1.with_load(running=1, context_tokens=100)).prefill == "p1"


def test_a_unified_worker_that_is_a_little_slower_keeps_its_prefills() -> None:
    for prefill_token_ms, prefill in ((1.2, None), (1.35, "p1")):
        slower = U1.with_load(times=replace(TIMES, prefill_token_ms=prefill_token_ms))
        assert place(1000, P1, slower).prefill == prefill


def test_what_is_queued_on_the_decode_worker_counts_for_both_places() -> None:
    """300 queued tokens are before the prompt here, and between the tokens after the first when it comes from there."""
    assert place(1000, P1, U1.with_load(queued_prefill_tokens=300)).prefill is None


def test_the_prefill_worker_with_the_shorter_queue_is_chosen() -> None:
    assert place(1000, P1.with_load(queued_prefill_tokens=10), P2, D1).prefill == "p2"


def test_a_warm_prefill_worker_is_chosen_until_its_queue_outweighs_it() -> None:
    warm = replace(P1, cached=900)

    assert place(1000, warm.with_load(queued_prefill_tokens=800), P2, D1).prefill == "p1"
    assert place(1000, warm.with_load(queued_prefill_tokens=1000), P2, D1).prefill == "p2"


# Reuse across workers.

FAST = WorkerRates(prefill_tokens_s=1000.0, transfer_bytes_s=1e9, groups=(GroupBytes(token_bytes=1000),))
"""A token is read in a thousandth of the time that computing it takes."""
REUSE = replace(TOKENS, local_prefill_max_tokens=32, reuse=ReuseRules(min_tokens=32, overhead_s=0.01, margin=0.0))


def place_reuse(prompt_tokens: int, *workers: Worker, force_remote: bool = False) -> Placed:
    able = [worker.with_load(rates=FAST) for worker in workers]
    return place(prompt_tokens, *able, rules=REUSE, force_remote=force_remote)


def test_without_rules_for_reuse_nothing_is_fetched() -> None:
    placed = place(1000, P1, D1, replace(D2, cached=960).with_load(running=60), rules=TOKENS)

    assert (placed.decode, placed.reuse.verdict) == ("d1", "nothing")


def test_a_unified_worker_fetches_what_a_busy_one_holds() -> None:
    placed = place_reuse(1000, replace(U1, cached=960).with_load(running=9), U2)

    assert (placed.decode, placed.prefill, placed.remaining) == ("u2", None, 40)
    assert (placed.reuse.verdict, placed.reuse.sources, placed.reuse.gained_tokens) == ("fetch", ("u1",), 960)


def test_the_holder_itself_is_chosen_while_it_is_idle() -> None:
    placed = place_reuse(1000, replace(U1, cached=960), U2)

    assert (placed.decode, placed.reuse.verdict) == ("u1", "nothing")


@pytest.mark.parametrize(("rest", "prefill"), [(32, None), (33, "p1")])
def test_a_decode_worker_fetches_and_computes_the_rest_when_its_limit_allows(rest: int, prefill: str | None) -> None:
    """Rule 15: by the tokens that are uncached there, after what is fetched."""
    placed = place_reuse(960 + rest, replace(P1, cached=960), D1)

    assert (placed.prefill, placed.remaining) == (prefill, rest)
    assert placed.reuse.sources == (("p1",) if prefill is None else ())


def test_a_refused_local_prefill_goes_remote_whatever_could_be_fetched() -> None:
    assert place_reuse(970, replace(P1, cached=960), D1, force_remote=True).prefill == "p1"


def test_the_prefill_worker_fetches_what_another_holds() -> None:
    placed = place_reuse(
        1960, replace(P1, cached=960).with_load(queued_prefill_tokens=5000), P2, D1.with_load(running=9)
    )

    assert (placed.prefill, placed.remaining, placed.reuse.sources) == ("p2", 1000, ("p1",))


def test_blocks_move_between_equal_layouts_only() -> None:
    other = replace(U1, cached=960, fingerprint="another").with_load(running=31)

    assert place_reuse(1000, other, U2).reuse.verdict == "nothing"


def test_the_longest_holders_are_asked_and_of_equals_the_least_loaded() -> None:
    holders = [
        replace(U1, worker_id=f"h{number}", cached=960).with_load(running=20 + number, queued_prefill_tokens=9999)
        for number in range(8)
    ]
    short = replace(U1, worker_id="short", cached=320).with_load(queued_prefill_tokens=9999)

    assert place_reuse(1000, *reversed(holders), short, U2).reuse.sources == ("h0", "h1", "h2", "h3")
