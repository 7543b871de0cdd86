from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.policies import POLICIES, PlacementDemand, PolicyName, PolicyRules, Scores
from cluster.pools import PoolSpec
from cluster.reuse import GroupBytes, WorkerRates
from cluster.snapshot import Snapshot, WorkerFacts, WorkerLoad
from cluster.step_time import StepTimes

POOLS = (
    PoolSpec(name="prefill", role="prefill"),
    PoolSpec(name="decode", role="decode"),
    PoolSpec(name="both", role="unified"),
)
TIMES = StepTimes(base_ms=10.0, prefill_token_ms=1.0, decode_token_ms=2.0, context_token_ms=0.01)
IDLE = WorkerLoad(free_tokens=100_000, total_tokens=100_000, times=TIMES)


def snapshot_of(*workers: tuple[str, WorkerLoad]) -> Snapshot:
    snapshot = Snapshot(POOLS)
    for number, (pool, load) in enumerate(workers):
        snapshot.update(WorkerFacts(worker_id=f"w{number}", incarnation="i", pool=pool), load)
    return snapshot


def scores(
    policy: PolicyName,
    snapshot: Snapshot,
    demand: PlacementDemand,
    matched: Sequence[int] = (),
    rules: PolicyRules | None = None,
) -> Scores:
    held = np.array(matched or [0] * len(snapshot), np.int64)
    return POLICIES[policy](snapshot, demand, held, rules or PolicyRules())


def test_dynamo_s_published_example_costs_18_10_and_11() -> None:
    """Rule 18: of ten blocks 2, 5, 8 are cached, and 2, 0, 7 blocks are active."""
    snapshot = snapshot_of(*(("both", replace(IDLE, context_tokens=16 * active)) for active in (2, 0, 7)))

    found = scores(
        "dynamo_cost", snapshot, PlacementDemand(prompt_tokens=160), [32, 80, 128], PolicyRules(block_size=16)
    )

    assert found.parts["prefill_blocks"].tolist() == [8, 5, 2]
    assert found.parts["decode_blocks"].tolist() == [10, 5, 9]
    assert found.cost.tolist() == [18, 10, 11]


def test_dynamo_s_weight_draws_to_what_is_cached() -> None:
    snapshot = snapshot_of(*(("both", replace(IDLE, context_tokens=16 * active)) for active in (2, 0, 7)))

    rules = PolicyRules(block_size=16, overlap_weight=3.0)

    found = scores("dynamo_cost", snapshot, PlacementDemand(prompt_tokens=160), [32, 80, 128], rules)
    assert found.cost.tolist() == [34, 20, 15]


def test_dynamo_counts_no_decode_on_a_worker_that_is_to_prefill() -> None:
    snapshot = snapshot_of(("prefill", replace(IDLE, queued_prefill_tokens=320, context_tokens=9999)))

    demand = PlacementDemand(prompt_tokens=160, stage="prefill")

    assert scores("dynamo_cost", snapshot, demand, [0], PolicyRules(block_size=16)).cost.tolist() == [30]


def test_lmetric_multiplies_prefill_tokens_and_batch_size() -> None:
    """400 new tokens beside 2 requests against 100 beside 9: 1,200 and 1,000; queued tokens are tokens, too."""
    snapshot = snapshot_of(
        ("both", replace(IDLE, running=2)),
        ("both", replace(IDLE, running=8, waiting=1)),
        ("both", replace(IDLE, running=1, queued_prefill_tokens=300)),
    )

    found = scores("lmetric", snapshot, PlacementDemand(prompt_tokens=400), [0, 300, 300])

    assert found.cost.tolist() == [1200, 1000, 800]


def test_a_miss_goes_to_the_idle_worker_however_much_others_it_holds() -> None:
    """Case 60: what a worker has cached of other prompts is no part of any cost."""
    snapshot = snapshot_of(
        ("both", replace(IDLE, free_tokens=90_000)),
        ("both", replace(IDLE, running=10, context_tokens=10_000, free_tokens=90_000)),
    )

    for policy in POLICIES:
        found = scores(policy, snapshot, PlacementDemand(prompt_tokens=1000))
        assert found.cost[0] < found.cost[1] or policy == "round_robin"


def test_cache_aware_gives_a_prefix_up_where_the_load_outweighs_it() -> None:
    """Rule 18: 960 cached tokens are worth 30 running requests of 32 tokens."""
    for running, expected in ((29, 0), (31, 1)):
        snapshot = snapshot_of(("both", replace(IDLE, running=running)), ("both", IDLE))

        found = scores("cache_aware", snapshot, PlacementDemand(prompt_tokens=1000), [960, 0])

        assert found.cost.argmin() == expected


def test_least_loaded_does_not_care_for_what_is_cached() -> None:
    snapshot = snapshot_of(("both", replace(IDLE, queued_prefill_tokens=1)), ("both", IDLE))

    assert scores("least_loaded", snapshot, PlacementDemand(prompt_tokens=1000), [960, 0]).cost.tolist() == [1, 0]


def test_round_robin_is_decided_by_its_turns_alone() -> None:
    snapshot = snapshot_of(*[("both", IDLE)] * 3)

    chosen = []
    for _ in range(7):
        row = int(scores("round_robin", snapshot, PlacementDemand(prompt_tokens=10)).cost.argmin())
        snapshot.note_choice(row)
        chosen.append(row)

    assert chosen == [0, 1, 2, 0, 1, 2, 0]


def test_a_worker_that_comes_back_to_the_round_robin_does_not_get_all_it_has_missed() -> None:
    snapshot = snapshot_of(*[("both", IDLE)] * 2)
    for _ in range(5):
        snapshot.note_choice(0)

    turns = []
    for _ in range(4):
        row = int(scores("round_robin", snapshot, PlacementDemand(prompt_tokens=10)).cost.argmin())
        snapshot.note_choice(row)
        turns.append(row)

    assert turns == [1, 0, 1, 0]


# Predicted latency: the numbers follow from TIMES.


def test_a_prefill_row_costs_its_queue_its_own_prompt_and_what_shows_of_the_hand_off() -> None:
    """1,024 tokens in 2 chunks: 2 x (10 + 0.01 x 512) + 1,024 ms; a read of 100 ms leaves the last chunk's half."""
    snapshot = snapshot_of(("prefill", IDLE), ("prefill", replace(IDLE, queued_prefill_tokens=512)))

    found = scores(
        "predicted_latency", snapshot, PlacementDemand(prompt_tokens=1024, stage="prefill", transfer_ms=100.0)
    )

    compute_ms = 2 * (10 + 0.01 * 512) + 1024
    assert found.parts["compute_ms"] == pytest.approx([compute_ms, compute_ms])
    assert found.parts["handoff_ms"] == pytest.approx([60.0, 60.0])
    assert found.cost[1] - found.cost[0] == pytest.approx(512 + 0.01 * 256 + 10)


def test_a_read_that_is_slower_than_the_prefill_shows_by_what_it_is_behind() -> None:
    snapshot = snapshot_of(("prefill", IDLE))

    demand = PlacementDemand(prompt_tokens=1024, stage="prefill", transfer_ms=5000.0)
    parts = scores("predicted_latency", snapshot, demand).parts

    assert parts["handoff_ms"][0] == pytest.approx(10.0 + 5000.0 - parts["compute_ms"][0])


def test_a_decode_row_costs_its_own_tokens_and_those_that_it_makes_late() -> None:
    """Each of 4 decodes gets 100 tokens by 2 + 0.01 x 250 ms later."""
    load = replace(IDLE, running=4, context_tokens=1000)
    snapshot = snapshot_of(("decode", load))

    parts = scores("predicted_latency", snapshot, PlacementDemand(prompt_tokens=200, output_tokens=100)).parts

    assert parts["tokens_ms"][0] == pytest.approx(100 * (10 + 4 * 2 + 0.01 * 1000 + 4.5))
    assert parts["others_ms"][0] == pytest.approx(100 * 4 * 4.5)


def test_the_weight_of_others_is_configured() -> None:
    snapshot = snapshot_of(("decode", replace(IDLE, running=4)))

    demand = PlacementDemand(prompt_tokens=200, output_tokens=100)

    full = scores("predicted_latency", snapshot, demand).parts["others_ms"][0]
    half = scores("predicted_latency", snapshot, demand, rules=PolicyRules(delay_weight=0.5)).parts["others_ms"][0]
    assert half == pytest.approx(full / 2)


def test_token_1_comes_from_wherever_it_is_sooner() -> None:
    """An idle decode worker is as fast as an idle prefill worker, without the hand-off; a busy one is not."""
    snapshot = snapshot_of(("prefill", IDLE), ("decode", IDLE), ("decode", replace(IDLE, running=8)))

    parts = scores("predicted_latency", snapshot, PlacementDemand(prompt_tokens=512)).parts

    here_ms = 512 + 10 + 0.01 * 256
    assert parts["first_token_ms"][1] == pytest.approx(here_ms)
    assert parts["first_token_ms"][2] == pytest.approx(here_ms + 10.0)


@pytest.mark.parametrize(("output_tokens", "delay_ms"), [(1, 0.0), (2, 510 + 5.12), (100, 2048 / 510 * (510 + 5.12))])
def test_what_is_queued_on_a_decode_row_holds_up_as_many_tokens_as_are_generated(
    output_tokens: int, delay_ms: float
) -> None:
    """2,048 queued tokens of two prompts, 510 in a step beside these two; each chunk attends to 512, 0.01 ms each."""
    queued = replace(IDLE, queued_prefill_tokens=2048, waiting=2, times=replace(TIMES, decode_token_ms=0.0))
    snapshot = snapshot_of(("prefill", IDLE), ("decode", queued), ("decode", IDLE))

    demand = PlacementDemand(prompt_tokens=512, output_tokens=output_tokens)
    first = scores("predicted_latency", snapshot, demand, [0, 0, 0]).parts["first_token_ms"]

    assert first[1] == pytest.approx(512 + 10 + 0.01 * 256 + 10.0 + delay_ms)


def test_a_unified_worker_does_not_prefill_for_others() -> None:
    busy = replace(IDLE, running=8)
    snapshot = snapshot_of(("both", IDLE), ("decode", busy), ("prefill", replace(IDLE, queued_prefill_tokens=512)))

    parts = scores("predicted_latency", snapshot, PlacementDemand(prompt_tokens=512)).parts

    assert parts["first_token_ms"][1] == pytest.approx(snapshot.columns.queue_ms[2] + 512 + 10 + 0.01 * 256 + 10.0)


def test_a_decode_row_far_from_the_prefill_workers_costs_the_read() -> None:
    groups = (GroupBytes(token_bytes=1000),)
    near, far = WorkerRates(transfer_bytes_s=1e9, groups=groups), WorkerRates(transfer_bytes_s=1e6, groups=groups)
    busy = replace(IDLE, running=8)
    snapshot = snapshot_of(
        ("prefill", replace(IDLE, rates=near)),
        ("decode", replace(busy, rates=near)),
        ("decode", replace(busy, rates=far)),
    )

    cost = scores("predicted_latency", snapshot, PlacementDemand(prompt_tokens=512)).cost

    # The prompt is one chunk, so nothing is read while it is computed.
    assert cost[2] - cost[1] == pytest.approx(512 - 0.512)


def test_lacking_room_costs_the_time_until_it_is_given_back() -> None:
    """What 1,000 held tokens take to be given back, for each of them."""
    load = replace(IDLE, running=2, total_tokens=2000, free_tokens=1000)
    snapshot = snapshot_of(("decode", load))

    found = scores("predicted_latency", snapshot, PlacementDemand(prompt_tokens=200, output_tokens=100))

    assert found.per_lacking_token[0] == pytest.approx(found.parts["tokens_ms"][0] / 1000)


def test_without_a_prefill_worker_a_unified_one_computes_itself() -> None:
    snapshot = snapshot_of(("both", IDLE))

    parts = scores("predicted_latency", snapshot, PlacementDemand(prompt_tokens=512)).parts

    assert parts["first_token_ms"][0] == pytest.approx(512 + 10 + 0.01 * 256)


LOADS = st.builds(
    WorkerLoad,
    queued_prefill_tokens=st.integers(0, 50_000),
    running=st.integers(0, 64),
    waiting=st.integers(0, 64),
    context_tokens=st.integers(0, 100_000),
    free_tokens=st.integers(0, 50_000),
    total_tokens=st.just(100_000),
    times=st.builds(
        StepTimes,
        base_ms=st.floats(0.1, 100),
        prefill_token_ms=st.floats(0.01, 5),
        decode_token_ms=st.floats(0.01, 5),
        context_token_ms=st.floats(1e-6, 0.01),
    ),
)


@given(
    policy=st.sampled_from(sorted(POLICIES)),
    workers=st.lists(st.tuples(st.sampled_from(["prefill", "decode", "both"]), LOADS), min_size=1, max_size=5),
    prompt=st.integers(2, 30_000),
    share=st.floats(0, 1),
    stage=st.sampled_from(["decode", "prefill"]),
)
def test_one_cached_token_more_never_makes_a_worker_dearer_and_never_by_a_jump(
    policy: PolicyName, workers: list[tuple[str, WorkerLoad]], prompt: int, share: float, stage: str
) -> None:
    """Rule 18: continuous, not a cliff."""
    snapshot = snapshot_of(*workers)
    demand = PlacementDemand(prompt_tokens=prompt, stage=stage)
    held = int(share * (prompt - 1))

    before = scores(policy, snapshot, demand, [held] * len(workers)).cost
    after = scores(policy, snapshot, demand, [held + 1] * len(workers)).cost

    assert (before >= 0).all()
    assert (after <= before + 1e-6).all()
    # What a token is worth: its own time and those of the steps that are shared, for the request and all others.
    worth = (before + 1e3) * 0.5 / max(1, (prompt - held)) + 65 * 5 * 2 + 1e3 * (policy == "lmetric")
    assert (before - after <= worth).all()


@given(policy=st.sampled_from(sorted(set(POLICIES) - {"round_robin"})), load=LOADS, prompt=st.integers(2, 30_000))
def test_more_load_never_makes_a_worker_cheaper(policy: PolicyName, load: WorkerLoad, prompt: int) -> None:
    snapshot = snapshot_of(
        ("both", load),
        ("both", replace(load, queued_prefill_tokens=load.queued_prefill_tokens + 1000, waiting=load.waiting)),
        ("both", replace(load, running=load.running + 1, context_tokens=load.context_tokens + 1000)),
    )

    cost = scores(policy, snapshot, PlacementDemand(prompt_tokens=prompt)).cost

    assert cost[0] <= cost[1] + 1e-6
    assert cost[0] <= cost[2] + 1e-6


@given(policy=st.sampled_from(sorted(set(POLICIES) - {"round_robin"})), load=LOADS, prompt=st.integers(2, 30_000))
def test_pending_load_always_costs_something(policy: PolicyName, load: WorkerLoad, prompt: int) -> None:
    """Rule 16: otherwise a burst stays where it began."""
    found = scores(policy, snapshot_of(("both", load)), PlacementDemand(prompt_tokens=prompt))

    assert found.per_token[0] > 0
    assert found.per_request[0] > 0
    assert found.per_lacking_token[0] > 0
