"""A board of pools whose loads a test sets by worker."""

import numpy as np

from cluster.pool_board import Allowance, Kind, PoolBoard, SpillRules, WorkerLoads
from cluster.pools import PoolSpec
from tests.unit.cluster.pool_clock import Clock

SHORT, LONG, SMALL_KV, LARGE_KV = range(4)
POOLS = (
    PoolSpec(name="short", role="prefill", max_prefill_tokens=2048, max_queue_tokens=10_000),
    PoolSpec(name="long", role="prefill", min_prefill_tokens=2049, max_queue_tokens=100_000),
    PoolSpec(name="small-kv", role="decode", max_context_tokens=8192),
    PoolSpec(name="large-kv", role="decode", min_context_tokens=8193),
)
UNIFIED = (
    PoolSpec(name="short", role="unified", max_prefill_tokens=2048, max_queue_tokens=10_000),
    PoolSpec(name="long", role="unified", min_prefill_tokens=2049, max_queue_tokens=100_000),
)
RULES = SpillRules(enter=0.8, leave=0.5, hold_s=1.0, long_max_wait_s=10.0, min_retry_s=0.5)
WORKERS = np.array([SHORT, SHORT, LONG, LONG, SMALL_KV, LARGE_KV])


class Bench:
    """A board with loads that a test sets by worker."""

    def __init__(self, pools: tuple[PoolSpec, ...] = POOLS, workers: np.ndarray = WORKERS) -> None:
        self.clock = Clock()
        self.board = PoolBoard(pools, RULES, self.clock)
        self.workers = workers
        self.usable = np.ones(len(workers), np.bool_)

    def load(self, *queued: int, free: tuple[int, ...] | None = None, rate: float = 1000.0) -> None:
        """Set the queues of the first workers, and the free ones of 100,000 tokens of KV of all; 2 s go by."""
        self.clock.now_s += 2.0
        queues = np.zeros(len(self.workers), np.int64)
        queues[: len(queued)] = queued
        loads = WorkerLoads(
            queued_prefill_tokens=queues,
            prefill_tokens_s=np.full(len(self.workers), rate),
            free_tokens=np.array(free if free is not None else [100_000] * len(self.workers)),
            total_tokens=np.full(len(self.workers), 100_000),
        )
        self.board.observe(self.workers, loads, self.usable)

    def decide(
        self, remaining: int | list[int], context: int | None = None, kind: Kind = "prefill", waited_s: float = 0.0
    ) -> Allowance:
        """Ask for a request; a list gives what each worker would have to compute."""
        rest = np.broadcast_to(np.array(remaining), self.workers.shape)
        whole = int(rest.max()) if context is None else context
        return self.board.decide(self.workers, rest, whole, kind=kind, waited_s=waited_s, usable=self.usable)

    def allowed(
        self, remaining: int | list[int], context: int | None = None, kind: Kind = "prefill", waited_s: float = 0.0
    ) -> list[int]:
        """The pools whose workers may take it."""
        rest = np.broadcast_to(np.array(remaining), self.workers.shape)
        whole = int(rest.max()) if context is None else context
        mask = self.board.allows(self.workers, rest, whole, kind=kind, waited_s=waited_s, usable=self.usable)
        return sorted(set(self.workers[mask].tolist()))
