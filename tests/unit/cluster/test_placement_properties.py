import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.placement import Placement, PlacementRules
from cluster.policies import POLICIES, PlacementDemand
from cluster.pools import PoolSpec
from cluster.reuse import GroupBytes, ReuseRules, WorkerRates
from cluster.snapshot import Snapshot, WorkerFacts, WorkerLoad
from cluster.step_time import StepTimes
from messages.errors import Unavailable

POOLS = (
    PoolSpec(name="prefill", role="prefill"),
    PoolSpec(name="decode", role="decode"),
    PoolSpec(name="both", role="unified"),
)
LIMIT = 64
TOTAL_TOKENS = 20_000


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Up to 40 workers of any kind in any state, and any request."""
    rules = PlacementRules(
        policy=draw(st.sampled_from(sorted(POLICIES))),
        local_prefill_max_tokens=LIMIT,
        num_candidates=draw(st.integers(1, 16)),
        reuse=draw(st.sampled_from([None, ReuseRules(min_tokens=16)])),
    )
    snapshot = Snapshot(POOLS, rules.reuse)
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    for number in range(draw(st.integers(0, 40))):
        facts = WorkerFacts(
            worker_id=f"w{number}",
            incarnation="i",
            pool=POOLS[random.integers(3)].name,
            fingerprint=f"layout-{random.integers(2)}",
        )
        snapshot.update(facts, some_load(random))
    demand = PlacementDemand(
        prompt_tokens=draw(st.integers(1, 30_000)), output_tokens=draw(st.integers(1, 4096)), seed=seed
    )
    matched = random.integers(0, demand.prompt_tokens + 1, len(snapshot)) * random.integers(0, 2, len(snapshot))
    return Placement(snapshot, demand, matched, rules)


def some_load(random: np.random.Generator) -> WorkerLoad:
    groups = (GroupBytes(token_bytes=int(random.integers(1, 100_000))), GroupBytes(token_bytes=1000, window=128))
    return WorkerLoad(
        queued_prefill_tokens=int(random.integers(0, 2) * random.integers(0, 50_000)),
        running=int(random.integers(0, 64)),
        waiting=int(random.integers(0, 8)),
        context_tokens=int(random.integers(0, TOTAL_TOKENS)),
        free_tokens=int(random.integers(0, TOTAL_TOKENS)),
        total_tokens=TOTAL_TOKENS,
        rates=WorkerRates(prefill_tokens_s=random.uniform(50, 1e5), transfer_bytes_s=1e9, groups=groups),
        times=StepTimes(
            base_ms=random.uniform(0.1, 50),
            prefill_token_ms=random.uniform(0.01, 5),
            decode_token_ms=random.uniform(0.01, 5),
            context_token_ms=random.uniform(1e-6, 1e-2),
        ),
    )


@settings(max_examples=300, deadline=None)
@given(made=placements(), share=st.floats(0, 1), force_remote=st.booleans())
def test_a_plan_keeps_to_roles_masks_and_limits(made: Placement, share: float, force_remote: bool) -> None:
    """Rules 13, 15, 17."""
    columns = made.snapshot.columns
    allowed = np.arange(len(made.snapshot)) % 7 < share * 7

    try:
        decode = made.rank_decode(allowed)
    except Unavailable:
        assert not (allowed & columns.can_decode).any()
        return
    assert all(allowed[row] and columns.can_decode[row] for row in decode.rows)
    row = decode.rows[0]
    others = allowed & columns.only_prefills & (columns.fingerprint == columns.fingerprint[row])
    try:
        plan = made.plan_prefill(row, allowed, force_remote=force_remote)
    except Unavailable:
        assert not others.any()
        assert not columns.can_prefill[row]
        assert force_remote or made.remaining_tokens[row] > LIMIT
        return
    if plan.ranking is not None:
        assert all(others[each] for each in plan.ranking.rows)
        assert force_remote or made.remaining_tokens[row] > LIMIT
    elif not columns.can_prefill[row]:
        assert not force_remote
        assert plan.max_uncached_tokens == max(LIMIT, made.remaining_tokens[row])
        if plan.reason == "sooner_here":
            assert plan.local_ms is not None
            assert plan.remote_ms is not None
            assert plan.local_ms * 1.25 + 50 < plan.remote_ms


@settings(max_examples=200, deadline=None)
@given(made=placements())
def test_the_first_candidate_is_the_cheapest_of_all_and_the_others_follow_in_order(made: Placement) -> None:
    allowed = made.snapshot.all_but()
    if not made.snapshot.columns.can_decode.any():
        return

    ranking = made.rank_decode(allowed)

    fits = made.snapshot.columns.can_decode & (made.need().kv_tokens < TOTAL_TOKENS)
    able = fits if fits.any() else made.snapshot.columns.can_decode
    costs = made.total_cost(ranking.scores, made.need(decodes=True))
    assert costs[ranking.rows[0]] == costs[able].min()
    assert [costs[row] for row in ranking.rows] == sorted(costs[row] for row in ranking.rows)
    assert len(set(ranking.rows)) == len(ranking.rows)
    assert all(np.isfinite(each.cost) for each in ranking.candidates)


@settings(max_examples=150, deadline=None)
@given(made=placements())
def test_what_is_fetched_is_what_the_remaining_tokens_were_counted_with(made: Placement) -> None:
    """Rule 14: the plan for one worker agrees with the columns for all."""
    prompt_tokens = made.need().kv_tokens
    for row in range(len(made.snapshot)):
        plan = made.plan_reuse(row)

        uncached = max(1, prompt_tokens - int(made.matched_tokens[row]))
        assert made.remaining_tokens[row] == uncached - plan.gained_tokens * (plan.verdict == "fetch")
        assert made.snapshot.worker_ids[row] not in plan.sources
