"""Prefill workers that compute at a fixed rate, one prompt after another, behind a board of pools; the time is made."""

import heapq
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cluster.pool_board import PoolBoard, SpillRules, WorkerLoads
from cluster.pools import PoolSpec, prefill_boundaries, with_boundaries
from cluster.thresholds import Thresholds
from messages.errors import Unavailable
from tests.unit.cluster.pool_clock import Clock

HEARTBEAT_S = 0.2


@dataclass(slots=True, kw_only=True)
class Prompt:
    """One prompt, and what became of it."""

    arrived_s: float
    tokens: int
    started_s: float = -1.0
    done_s: float = -1.0
    pool: str = ""

    @property
    def waited_s(self) -> float:
        """From its arrival to the beginning of its prefill."""
        return self.started_s - self.arrived_s

    @property
    def ttft_s(self) -> float:
        """From its arrival to the end of its prefill."""
        return self.done_s - self.arrived_s


class Cluster:
    """Workers of pools; a prompt goes to the allowed one with the shortest queue, and stays there.

    What no pool takes now waits at the door and asks again at every heartbeat.
    """

    def __init__(
        self,
        pools: Sequence[PoolSpec],
        num_workers: Sequence[int],
        rules: SpillRules,
        *,
        rate: float = 5000.0,
        thresholds: Thresholds | None = None,
        dead: str = "",
        clock: Clock | None = None,
    ) -> None:
        """Start the workers idle.

        Args:
            pools: What they take.
            num_workers: Of each pool.
            rules: When to spill.
            rate: Tokens that a worker computes per second.
            thresholds: What moves the ranges; None: they stay.
            dead: The pool whose workers are all dead.
            clock: That of `thresholds`.
        """
        self.clock = clock or Clock()
        self.board = PoolBoard(pools, rules, self.clock)
        self.busy_s = {pool.name: 0.0 for pool in pools}
        """Of all workers of each pool."""
        self.num_moves = 0
        """Of boundaries."""
        self._rate = rate
        self._num_workers = [float(number) for number in num_workers]
        self._thresholds = thresholds
        self._workers = np.repeat(np.arange(len(pools)), num_workers)
        self._usable = np.array([pools[pool].name != dead for pool in self._workers])
        self._free_at_s = np.zeros(len(self._workers))
        self._door: list[Prompt] = []

    def run(self, prompts: Iterable[Prompt]) -> list[Prompt]:
        """Let prompts arrive in the order of their times; heartbeats go on until none is at the door."""
        prompts = sorted(prompts, key=lambda prompt: prompt.arrived_s)
        beat_s = self.clock.now_s
        for prompt in prompts:
            while beat_s <= prompt.arrived_s:
                self._beat(beat_s)
                beat_s += HEARTBEAT_S
            self.clock.now_s = prompt.arrived_s
            self._ask(prompt)
        while self._door:
            self._beat(beat_s)
            beat_s += HEARTBEAT_S
        return prompts

    def _beat(self, now_s: float) -> None:
        self.clock.now_s = now_s
        many = np.full(len(self._workers), 1e9)
        loads = WorkerLoads(
            queued_prefill_tokens=self._queued_s() * self._rate,
            prefill_tokens_s=np.full(len(self._workers), self._rate),
            free_tokens=many,
            total_tokens=many,
        )
        self.board.observe(self._workers, loads, self._usable)
        if self._thresholds is not None and self._thresholds.adapt(self._num_workers):
            self.board.replace_pools(with_boundaries(self.board.pools, self._thresholds.boundaries))
            self.num_moves += 1
        waiting, self._door = self._door, []
        for prompt in waiting:
            self._ask(prompt)

    def _ask(self, prompt: Prompt) -> None:
        if self._thresholds is not None and prompt.arrived_s == self.clock.now_s:
            self._thresholds.observe(prompt.tokens)
        remaining = np.full(len(self._workers), prompt.tokens)
        waited_s = self.clock.now_s - prompt.arrived_s
        try:
            mask = self.board.allows(
                self._workers, remaining, prompt.tokens, kind="prefill", waited_s=waited_s, usable=self._usable
            )
        except Unavailable:
            self._door.append(prompt)
            return
        worker = int(np.argmin(np.where(mask, self._queued_s(), np.inf)))
        prompt.pool = self.board.pools[self._workers[worker]].name
        prompt.started_s = max(self.clock.now_s, float(self._free_at_s[worker]))
        prompt.done_s = prompt.started_s + prompt.tokens / self._rate
        self._free_at_s[worker] = prompt.done_s
        self.busy_s[prompt.pool] += prompt.tokens / self._rate

    def _queued_s(self) -> np.ndarray:
        return np.maximum(self._free_at_s - self.clock.now_s, 0.0)

    def boundaries(self) -> tuple[int, ...] | None:
        """Where the ranges of the pools meet now."""
        return prefill_boundaries(self.board.pools)

    def num_switches(self) -> int:
        """How often any pool became over, or stopped being so."""
        return sum(state.num_switches for state in self.board.states())


@dataclass(slots=True, order=True)
class _Leaving:
    at_s: float
    request_id: str


class Leavings:
    """Requests that leave when they have held their tokens for long enough, in the order of their times."""

    def __init__(self) -> None:
        self._heap: list[_Leaving] = []

    def add(self, request_id: str, at_s: float) -> None:
        """Plan one."""
        heapq.heappush(self._heap, _Leaving(at_s, request_id))

    def next(self, until_s: float) -> tuple[float, str] | None:
        """The first that leaves until then; None: nobody."""
        if not self._heap or self._heap[0].at_s > until_s:
            return None
        leaving = heapq.heappop(self._heap)
        return leaving.at_s, leaving.request_id


def poisson(rate_s: float, until_s: float, lengths: Sequence[int], seed: int, from_s: float = 0.0) -> list[Prompt]:
    """Prompts at random times, `rate_s` a second on average, of lengths drawn at random."""
    generator = random.Random(seed)  # noqa: S311 - traffic, no secrets
    prompts: list[Prompt] = []
    now_s = from_s + generator.expovariate(rate_s)
    while now_s < until_s:
        prompts.append(Prompt(arrived_s=now_s, tokens=generator.choice(lengths)))
        now_s += generator.expovariate(rate_s)
    return prompts


def p95(values: Iterable[float]) -> float:
    """The value that 95 of 100 do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
