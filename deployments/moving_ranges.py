"""Moves the boundaries between pools of shorter and of longer prompts, so that all are equally busy."""

import logging
import time
from collections.abc import Callable

from cluster.pool_board import PoolBoard
from cluster.pools import prefill_chain, with_boundaries
from cluster.thresholds import Thresholds

log = logging.getLogger(__name__)

ADAPT_PERIOD_S = 1.0


class MovingRanges:
    """Of one gateway; the pools of the board keep being a chain of ranges.

    Args:
        board: Whose ranges move.
        thresholds: Says where to.
        clock: Seconds, monotonic.
    """

    def __init__(self, board: PoolBoard, thresholds: Thresholds, clock: Callable[[], float] = time.monotonic) -> None:
        self._board = board
        self._thresholds = thresholds
        self._clock = clock
        self._adapted_s = clock()

    def note(self, uncached_tokens: int) -> None:
        """Learn from a prompt that was placed, and move the boundaries when they should be elsewhere."""
        self._thresholds.observe(uncached_tokens)
        now_s = self._clock()
        if now_s - self._adapted_s < ADAPT_PERIOD_S:
            return
        self._adapted_s = now_s
        if self._thresholds.adapt(self._capacities()):
            boundaries = self._thresholds.boundaries
            self._board.replace_pools(with_boundaries(self._board.pools, boundaries))
            log.info("pools.moved boundaries=%s", boundaries)

    def _capacities(self) -> list[float]:
        """Prompt tokens per second of each range's workers."""
        states = zip(self._board.pools, self._board.states(), strict=True)
        rates = {(pool.min_prefill_tokens, pool.max_prefill_tokens): 0.0 for pool in self._board.pools}
        for pool, state in states:
            if pool.can_prefill:
                rates[pool.min_prefill_tokens, pool.max_prefill_tokens] += state.prefill_tokens_s
        return [rates[bounds] for bounds in prefill_chain(self._board.pools)]
