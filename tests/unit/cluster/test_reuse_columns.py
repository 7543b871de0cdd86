from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.pools import PoolSpec
from cluster.reuse import GroupBytes, ReuseRules, WorkerRates, assess_reuse
from cluster.reuse_columns import cover
from cluster.snapshot import Snapshot, WorkerFacts, WorkerLoad

RULES = ReuseRules(min_tokens=10, overhead_s=0.1, margin=0.25)
LAYOUTS = {
    "full": (GroupBytes(token_bytes=500),),
    "windowed": (GroupBytes(token_bytes=300), GroupBytes(token_bytes=400, window=64)),
}


def snapshot_of(*workers: tuple[str, WorkerRates]) -> Snapshot:
    """Unified workers, each given as fingerprint and rates."""
    snapshot = Snapshot((PoolSpec(name="both", role="unified"),), RULES)
    for number, (fingerprint, rates) in enumerate(workers):
        facts = WorkerFacts(worker_id=f"w{number}", incarnation="i", pool="both", fingerprint=fingerprint)
        snapshot.update(facts, WorkerLoad(rates=replace(rates, groups=LAYOUTS[fingerprint])))
    return snapshot


def test_without_rules_only_what_is_there_counts() -> None:
    snapshot = snapshot_of(("full", WorkerRates()), ("full", WorkerRates()))

    coverage = cover(snapshot, 1000, np.array([0, 900]), None)

    assert coverage.remaining_tokens.tolist() == coverage.work_tokens.tolist() == [1000, 100]


def test_the_last_prompt_token_is_always_computed() -> None:
    """Rule 14."""
    snapshot = snapshot_of(("full", WorkerRates()))

    assert cover(snapshot, 64, np.array([64]), RULES).remaining_tokens.tolist() == [1]


def test_nobody_fetches_from_another_layout() -> None:
    """Rule 13."""
    snapshot = snapshot_of(("full", WorkerRates()), ("windowed", WorkerRates()))

    assert cover(snapshot, 5000, np.array([0, 4000]), RULES).remaining_tokens.tolist() == [5000, 1000]


@given(
    prompt=st.integers(1, 5000),
    workers=st.lists(
        st.tuples(
            st.sampled_from(sorted(LAYOUTS)),
            st.integers(0, 5000),
            st.one_of(st.none(), st.floats(10.0, 1e6)),
            st.one_of(st.none(), st.floats(1e4, 1e12)),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_all_workers_at_once_are_priced_as_each_alone(
    prompt: int, workers: list[tuple[str, int, float | None, float | None]]
) -> None:
    rates = [
        WorkerRates(prefill_tokens_s=prefill, transfer_bytes_s=transfer, groups=LAYOUTS[fingerprint])
        for fingerprint, _, prefill, transfer in workers
    ]
    snapshot = snapshot_of(*((worker[0], each) for worker, each in zip(workers, rates, strict=True)))
    matched = np.array([min(worker[1], prompt) for worker in workers])

    coverage = cover(snapshot, prompt, matched, RULES)

    for row, worker in enumerate(workers):
        others = [int(matched[i]) for i, each in enumerate(workers) if i != row and each[0] == worker[0]]
        plan = assess_reuse(int(matched[row]), max(others, default=0), prompt, rates[row], RULES)
        uncached = max(1, prompt - int(matched[row]))
        fetched = plan.gained_tokens if plan.verdict == "fetch" else 0
        assert coverage.remaining_tokens[row] == uncached - fetched
        assert coverage.work_tokens[row] == pytest.approx(uncached - plan.saved_tokens)
