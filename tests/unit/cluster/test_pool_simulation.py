"""Pools in traffic, as deterministic simulations: short requests stay fast, long ones begin, nothing flaps.

Rules 17 and 19, case 66.
"""

from dataclasses import replace

import pytest

from cluster.admission import Admission, AdmissionRules, Ask, Changes
from cluster.pool_board import SpillRules
from cluster.pools import PoolSpec
from cluster.thresholds import AdaptiveThresholds, ThresholdRules
from messages.errors import Overloaded
from tests.unit.cluster.pool_clock import Clock
from tests.unit.cluster.pool_simulation import Cluster, Leavings, Prompt, p95, poisson

SHORT_TOKENS, LONG_TOKENS = 300, 12_000
ONE_POOL = (PoolSpec(name="all", role="prefill"),)
TWO_POOLS = (
    PoolSpec(name="short", role="prefill", max_prefill_tokens=2048),
    PoolSpec(name="long", role="prefill", min_prefill_tokens=2049),
)
LINES = (replace(TWO_POOLS[0], max_queue_tokens=10_000), replace(TWO_POOLS[1], max_queue_tokens=20_000))
RULES = SpillRules(long_max_wait_s=10.0)
MIXED = [SHORT_TOKENS] * 9 + [LONG_TOKENS]


def short_ttft_p95(prompts: list[Prompt]) -> float:
    return p95(prompt.ttft_s for prompt in prompts if prompt.tokens <= 2048)


def test_ten_short_prompts_behind_a_long_one_do_not_wait_for_it() -> None:
    """Case 66: one queue before one worker, against two pools whose workers are half as fast."""

    def burst() -> list[Prompt]:
        return [Prompt(arrived_s=0.0, tokens=32_000), *(Prompt(arrived_s=0.01, tokens=200) for _ in range(10))]

    fcfs = Cluster(ONE_POOL, [1], RULES, rate=10_000.0).run(burst())
    pools = Cluster(TWO_POOLS, [1, 1], RULES, rate=5000.0).run(burst())

    assert short_ttft_p95(fcfs) > 3.0
    assert short_ttft_p95(pools) < 0.5 * short_ttft_p95(fcfs)


@pytest.mark.parametrize("seed", range(4))
def test_pools_keep_short_prompts_fast_in_mixed_traffic(seed: int) -> None:
    """Case 66: the same four workers, three quarters busy, as one pool and as one for short and three for long."""

    def traffic() -> list[Prompt]:
        return poisson(10.0, 400.0, MIXED, seed)

    fcfs = Cluster(ONE_POOL, [4], RULES).run(traffic())
    cluster = Cluster(TWO_POOLS, [1, 3], RULES)
    pools = cluster.run(traffic())

    assert short_ttft_p95(pools) < 0.5 * short_ttft_p95(fcfs)
    # The long ones pay for it, but they are not given up.
    long_fcfs, long_pools = ([prompt.ttft_s for prompt in run if prompt.tokens > 2048] for run in (fcfs, pools))
    assert p95(long_pools) < 2.5 * p95(long_fcfs)


def test_a_long_prompt_begins_in_time_though_its_pool_is_full_and_short_ones_never_stop() -> None:
    """Case 66, rule 17: after half of the wait it may go to the short pool, whose queue it then heads."""
    blocked = [Prompt(arrived_s=0.0, tokens=500_000), Prompt(arrived_s=0.0, tokens=500_000)]
    late = Prompt(arrived_s=5.0, tokens=32_000)
    steady = poisson(24.0, 60.0, [SHORT_TOKENS], seed=1)

    Cluster(LINES, [2, 2], RULES).run([*blocked, late, *steady])

    assert late.pool == "short"
    assert RULES.long_max_wait_s / 2 <= late.waited_s <= RULES.long_max_wait_s
    assert max(prompt.waited_s for prompt in steady) < RULES.long_max_wait_s


def test_long_prompts_never_enter_the_short_pool_while_theirs_can_take_them() -> None:
    prompts = Cluster(LINES, [2, 2], RULES).run(poisson(2.0, 300.0, MIXED, seed=2))

    assert {prompt.pool for prompt in prompts if prompt.tokens > 2048} == {"long"}


def test_with_a_pool_dead_everybody_is_served_by_the_other() -> None:
    """Rule 17: no request hangs."""
    for dead in ("short", "long"):
        prompts = Cluster(LINES, [2, 2], RULES, dead=dead).run(poisson(3.0, 100.0, MIXED, seed=3))

        assert {prompt.pool for prompt in prompts} == {"short", "long"} - {dead}
        assert max(prompt.waited_s for prompt in prompts) < 30.0


def test_spill_goes_both_ways_and_only_under_load() -> None:
    """Rule 17: short prompts for a minute, quiet, then middling ones that are long but fit the short pool."""
    quiet = poisson(5.0, 60.0, [SHORT_TOKENS, 3000], seed=4)
    many_short = poisson(55.0, 160.0, [SHORT_TOKENS], seed=5, from_s=100.0)
    many_long = poisson(4.2, 260.0, [3000], seed=6, from_s=200.0)
    cluster = Cluster(LINES, [2, 2], RULES)

    cluster.run([*quiet, *many_short, *many_long])

    assert {(prompt.tokens, prompt.pool) for prompt in quiet} == {(SHORT_TOKENS, "short"), (3000, "long")}
    assert 0 < sum(prompt.pool == "long" for prompt in many_short) < len(many_short) / 2
    assert 0 < sum(prompt.pool == "short" for prompt in many_long) < len(many_long) / 2
    assert max(prompt.waited_s for prompt in (*many_short, *many_long)) < 10.0


def test_a_load_at_the_boundary_does_not_flap() -> None:
    """Rule 17: slightly more than the short pool can do, for ten minutes; with one mark for both ways it flaps."""

    def switches(rules: SpillRules) -> int:
        cluster = Cluster(LINES, [2, 2], rules)
        cluster.run(poisson(34.5, 600.0, [SHORT_TOKENS], seed=7))
        return cluster.num_switches()

    with_two_marks = switches(RULES)
    with_one = switches(SpillRules(enter=0.8, leave=0.8, hold_s=0.0))

    assert 1 <= with_two_marks <= 60
    assert with_one > 4 * with_two_marks


@pytest.mark.parametrize("start", [400, 17_000])
def test_adaptive_boundaries_make_the_pools_equally_busy(start: int) -> None:
    """Equal token-seconds for what each can do: two workers for short prompts and two for long ones."""
    lengths = [round(64 * 1.1**step) for step in range(60)]
    clock = Clock()
    thresholds = AdaptiveThresholds((start,), ThresholdRules(half_life_s=600.0, hold_s=30.0), clock)
    pools = (
        replace(TWO_POOLS[0], max_prefill_tokens=start),
        replace(TWO_POOLS[1], min_prefill_tokens=start + 1),
    )
    cluster = Cluster(pools, [2, 2], RULES, thresholds=thresholds, clock=clock)
    cluster.run(poisson(3.2, 600.0, lengths, seed=8))
    settled, moves = dict(cluster.busy_s), cluster.num_moves

    cluster.run(poisson(3.2, 2600.0, lengths, seed=9, from_s=600.0))

    short_s, long_s = (cluster.busy_s[name] - settled[name] for name in ("short", "long"))
    assert short_s / (short_s + long_s) == pytest.approx(0.5, abs=0.08)
    assert moves >= 1
    assert cluster.num_moves - moves <= 6
    assert cluster.boundaries() == thresholds.boundaries


class Line:
    """Requests that hold their tokens for a fixed time, through an admission."""

    def __init__(self, rules: AdmissionRules, budget: int) -> None:
        self.clock = Clock()
        self.admission = Admission(rules, budget, self.clock)
        self.begun_s: dict[str, float] = {}
        self.refused: dict[str, Overloaded] = {}
        self._holds_s: dict[str, float] = {}
        self._leavings = Leavings()

    def enter(self, at_s: float, request_id: str, tokens: int, holds_s: float) -> None:
        self.advance(at_s)
        self._holds_s[request_id] = holds_s
        self._note(self.admission.enter(Ask(request_id=request_id, tokens=tokens)))

    def advance(self, until_s: float) -> None:
        while (leaving := self._leavings.next(until_s)) is not None:
            self.clock.now_s = leaving[0]
            self._note(self.admission.leave(leaving[1]))
        self.clock.now_s = until_s

    def _note(self, changes: Changes) -> None:
        for request_id in changes.begun:
            self.begun_s[request_id] = self.clock.now_s
            self._leavings.add(request_id, self.clock.now_s + self._holds_s[request_id])
        for refusal in changes.refused:
            assert isinstance(refusal.error, Overloaded)
            self.refused[refusal.request_id] = refusal.error


def stream_of_short_requests(max_wait_s: float) -> float | None:
    """When, after its arrival at 20 s, a request begins that needs most of a budget which others keep filled."""
    rules = AdmissionRules(max_requests=1000, max_waiting_tokens=100_000, max_wait_s=max_wait_s)
    line = Line(rules, budget=40_000)
    for number in range(2000):
        line.enter(number / 42, f"short-{number}", tokens=500, holds_s=2.0)
        if number == 840:
            line.enter(20.0, "long", tokens=32_000, holds_s=5.0)
    return line.begun_s["long"] - 20.0 if "long" in line.begun_s else None


def test_a_long_request_begins_in_time_while_short_ones_keep_the_budget_filled() -> None:
    """Case 66, rule 17: without the bound on passing, it would starve."""
    in_time = stream_of_short_requests(max_wait_s=10.0)

    assert in_time is not None
    assert 5.0 < in_time <= 10.0
    assert stream_of_short_requests(max_wait_s=1e9) is None


def test_who_comes_again_when_told_is_let_in() -> None:
    """Rule 19: the time to come again is when the line has room for it, not much later."""
    line = Line(AdmissionRules(max_waiting_tokens=8000, max_wait_s=1e9), budget=4000)
    for number in range(36):
        line.enter(number / 4, str(number), tokens=500, holds_s=4.0)
    line.enter(9.0, "refused", tokens=4000, holds_s=1.0)
    wait_s = float(str(line.refused["refused"].context["retry_after_s"]))

    line.enter(9.0 + wait_s / 3, "too early", tokens=4000, holds_s=1.0)
    line.enter(9.0 + wait_s, "again", tokens=4000, holds_s=1.0)

    assert wait_s > 1.0
    assert set(line.refused) == {"refused", "too early"}
