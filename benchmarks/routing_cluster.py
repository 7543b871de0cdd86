"""A large cluster for the routing benchmark, and a prompt that some of its workers know in part; equal in every run."""

import random

import numpy as np

from cluster.placement import Placement, PlacementRules
from cluster.policies import PlacementDemand
from cluster.pool_board import PoolBoard, SpillRules, WorkerLoads
from cluster.pools import PoolSpec
from cluster.reuse import GroupBytes, ReuseRules, WorkerRates
from cluster.snapshot import Ints, Snapshot, WorkerFacts, WorkerLoad
from cluster.step_time import StepTimes
from messages.reservations import Candidate

TOKEN_BYTES = 131_072
"""KV of a token of an 8B model with grouped heads, in 16 bits."""
BLOCK_SIZE = 32
POOLS = (
    PoolSpec(name="short", role="prefill", max_prefill_tokens=8192),
    PoolSpec(name="long", role="prefill", min_prefill_tokens=8193),
    PoolSpec(name="decode", role="decode"),
)
SHARES = (0.3, 0.2, 0.5)
"""Of the workers in each pool."""
HOLDER_SHARE = 0.06
"""Of the workers, those that hold a prefix of the prompt."""


class RoutedCluster:
    """A gateway's view of `num_workers` busy workers."""

    def __init__(self, num_workers: int, prompt_tokens: int, seed: int = 1) -> None:
        self._draw = random.Random(seed)  # noqa: S311 - a load, not a secret
        self._prompt_tokens = prompt_tokens
        self._snapshot = Snapshot(POOLS)
        self._rules = PlacementRules(reuse=ReuseRules())
        for number in range(num_workers):
            pool = self._draw.choices(POOLS, SHARES)[0]
            facts = WorkerFacts(worker_id=f"{pool.name}-{number}", incarnation="i", pool=pool.name)
            self._snapshot.update(facts, self._load(pool))
        self._board = PoolBoard(POOLS, SpillRules(), lambda: 0.0)
        columns = self._snapshot.columns
        loads = WorkerLoads(
            queued_prefill_tokens=columns.queued_prefill_tokens,
            prefill_tokens_s=columns.prefill_tokens_s,
            free_tokens=columns.free_tokens,
            total_tokens=columns.total_tokens,
        )
        self._board.observe(columns.pool, loads)
        self.matched_tokens = self._matched(num_workers)
        self._everyone = self._snapshot.all_but()

    def decide(self, seed: int) -> tuple[int, int]:
        """Take one decision: the decode worker's row, and the row that computes the prompt."""
        placement = self._placement(seed)
        decode_row = placement.rank_decode(self._everyone).rows[0]
        plan = placement.plan_prefill(decode_row, self._everyone)
        return decode_row, decode_row if plan.ranking is None else plan.ranking.rows[0]

    def decide_with_pools(self, seed: int) -> tuple[int, int]:
        """Take one, with the pools asked who may be chosen."""
        placement = self._placement(seed)
        pool, remaining = self._snapshot.columns.pool, placement.remaining_tokens
        allowed = self._board.allows(pool, remaining, self._prompt_tokens, kind="decode")
        decode_row = placement.rank_decode(allowed).rows[0]
        allowed = self._board.allows(pool, remaining, self._prompt_tokens, kind="prefill")
        plan = placement.plan_prefill(decode_row, allowed)
        return decode_row, decode_row if plan.ranking is None else plan.ranking.rows[0]

    def word_candidates(self) -> tuple[Candidate, ...]:
        """What the ledger is sent of one ranking."""
        return self._ranking.candidates

    def prepare_candidates(self) -> None:
        """Rank once, so that `word_candidates` has something to word."""
        self._ranking = self._placement(0).rank_decode(self._everyone)

    def beat(self) -> None:
        """Take in one heartbeat."""
        row = self._draw.randrange(len(self._snapshot))
        pool = POOLS[self._snapshot.columns.pool[row]]
        facts = WorkerFacts(worker_id=self._snapshot.worker_ids[row], incarnation="i", pool=pool.name)
        self._snapshot.update(facts, self._load(pool))

    def _placement(self, seed: int) -> Placement:
        demand = PlacementDemand(prompt_tokens=self._prompt_tokens, seed=seed)
        return Placement(self._snapshot, demand, self.matched_tokens, self._rules)

    def _matched(self, num_workers: int) -> Ints:
        matched = np.zeros(num_workers, np.int64)
        blocks = self._prompt_tokens // BLOCK_SIZE
        for row in self._draw.sample(range(num_workers), int(num_workers * HOLDER_SHARE)):
            matched[row] = self._draw.randint(1, blocks) * BLOCK_SIZE
        return matched

    def _load(self, pool: PoolSpec) -> WorkerLoad:
        draw, total = self._draw, 1_000_000
        running = draw.randrange(1, 40) if pool.can_decode else draw.randrange(3)
        return WorkerLoad(
            queued_prefill_tokens=0 if pool.can_decode else draw.randrange(30_000),
            running=running,
            waiting=draw.randrange(4),
            context_tokens=running * draw.randrange(500, 8000),
            free_tokens=draw.randrange(total // 5, total),
            total_tokens=total,
            rates=WorkerRates(
                prefill_tokens_s=draw.uniform(8000, 12_000),
                transfer_bytes_s=draw.uniform(1e10, 4e10),
                groups=(GroupBytes(token_bytes=TOKEN_BYTES),),
            ),
            times=StepTimes(
                base_ms=draw.uniform(6, 10),
                prefill_token_ms=draw.uniform(0.08, 0.12),
                decode_token_ms=draw.uniform(0.02, 0.1),
                context_token_ms=draw.uniform(1e-5, 5e-5),
            ),
        )
