"""Pools of short and long prompts keep meeting, where their loads are equal."""

import numpy as np

from cluster.pool_board import PoolBoard, SpillRules, WorkerLoads
from cluster.pools import PoolSpec, prefill_boundaries
from cluster.thresholds import AdaptiveThresholds, FixedThresholds, ThresholdRules
from deployments.moving_ranges import MovingRanges

POOLS = (
    PoolSpec(name="short", role="prefill", max_prefill_tokens=2048),
    PoolSpec(name="long", role="prefill", min_prefill_tokens=2049),
    PoolSpec(name="decode", role="decode"),
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def make_board(clock: Clock, rates: tuple[float, float]) -> PoolBoard:
    board = PoolBoard(POOLS, SpillRules(), clock)
    nothing = np.zeros(3)
    loads = WorkerLoads(
        queued_prefill_tokens=nothing,
        prefill_tokens_s=np.array([*rates, 1.0]),
        free_tokens=np.full(3, 1000.0),
        total_tokens=np.full(3, 1000.0),
    )
    board.observe(np.arange(3), loads)
    return board


def place(ranges: MovingRanges, clock: Clock, lengths: list[int], rounds: int = 300) -> None:
    for number in range(rounds):
        clock.now_s += 1.0
        ranges.note(lengths[number % len(lengths)])


def test_boundaries_move_to_where_both_pools_carry_the_same_load() -> None:
    clock = Clock()
    board = make_board(clock, (1000.0, 1000.0))
    ranges = MovingRanges(board, AdaptiveThresholds((2048,), ThresholdRules(), clock), clock)

    # Nine of ten tokens are in prompts of 300 to 500: all of them short by the boundary of the beginning.
    place(ranges, clock, [300, 350, 400, 450, 500] * 4 + [800])

    (boundary,) = prefill_boundaries(board.pools) or ()
    assert 350 <= boundary <= 460
    assert board.pools[2] == POOLS[2]


def test_a_pool_with_faster_workers_gets_more() -> None:
    boundaries = []
    for rates in ((1000.0, 3000.0), (3000.0, 1000.0)):
        clock = Clock()
        board = make_board(clock, rates)
        ranges = MovingRanges(board, AdaptiveThresholds((2048,), ThresholdRules(), clock), clock)
        place(ranges, clock, list(range(100, 1000, 10)), rounds=400)
        boundaries.append((prefill_boundaries(board.pools) or (0,))[0])

    assert boundaries[0] < 600 < boundaries[1]


def test_fixed_boundaries_stay() -> None:
    clock = Clock()
    board = make_board(clock, (1000.0, 1000.0))

    place(MovingRanges(board, FixedThresholds((2048,)), clock), clock, [300])

    assert board.pools == POOLS
