"""Steady short streams with long prompts between them, sent to any server, and what that did to the streams."""

import asyncio
import math
import random
import statistics
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

SendPrompt = Callable[[Sequence[int], int], AsyncGenerator[int, None]]
"""Streams one completion: (prompt, tokens to generate) to the number of tokens of each chunk as it arrives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadShape:
    """What is sent, and when."""

    quiet_s: float
    """At first the streams are alone."""
    busy_s: float
    """Then a long prompt arrives every `long_every_s`, the first at once."""
    num_streams: int = 4
    prompt_tokens: int = 200
    output_tokens: int = 200
    long_prompt_tokens: int = 6000
    long_output_tokens: int = 8
    long_every_s: float = 45.0


@dataclass(slots=True)
class Seen:
    """What the clients saw in one run; times are seconds since it began."""

    gaps: list[tuple[float, float]] = field(default_factory=list)
    """Of the streams: when a chunk came, and how long after the one before it."""
    tokens: list[tuple[float, int]] = field(default_factory=list)
    """Of the streams: when, and how many."""
    first_tokens: list[tuple[float, float]] = field(default_factory=list)
    """Of the streams: when a prompt was sent, and its time to first token."""
    long_first_s: list[float] = field(default_factory=list)
    """Time to first token of the long prompts that got one."""
    num_long: int = 0
    """Long prompts that were sent."""
    most_long_waiting: int = 0
    """Most of them without a first token at a time."""


async def run_load(send: SendPrompt, shape: LoadShape, draw: random.Random, vocabulary: range) -> Seen:
    """Send the load, each prompt a fresh one; what still runs at the end is cancelled."""
    load = _Load(send, shape, draw, vocabulary)
    tasks = [asyncio.create_task(load.stream()) for _ in range(shape.num_streams)]
    tasks.append(asyncio.create_task(load.send_long_ones()))
    done, _ = await asyncio.wait(tasks, timeout=shape.quiet_s + shape.busy_s, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
    return load.seen


class _Load:
    def __init__(self, send: SendPrompt, shape: LoadShape, draw: random.Random, vocabulary: range) -> None:
        self._send = send
        self._shape = shape
        self._draw = draw
        self._vocabulary = vocabulary
        self._started_s = time.perf_counter()
        self._num_waiting = 0
        self.seen = Seen()

    async def stream(self) -> None:
        """One user after another, for ever."""
        while True:
            sent_s = last_s = self._now_s()
            is_first = True
            prompt = self._prompt(self._shape.prompt_tokens)
            async with aclosing(self._send(prompt, self._shape.output_tokens)) as chunks:
                async for count in chunks:
                    now_s = self._now_s()
                    if is_first:
                        self.seen.first_tokens.append((sent_s, now_s - sent_s))
                    else:
                        self.seen.gaps.append((now_s, now_s - last_s))
                    # Tokens that came together came without a gap.
                    self.seen.gaps += [(now_s, 0.0)] * (count - 1)
                    self.seen.tokens.append((now_s, count))
                    is_first, last_s = False, now_s

    async def send_long_ones(self) -> None:
        """Each at its time, however many are still waiting."""
        await asyncio.sleep(self._shape.quiet_s)
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._send_long_one())
                await asyncio.sleep(self._shape.long_every_s)

    async def _send_long_one(self) -> None:
        sent_s = self._now_s()
        self.seen.num_long += 1
        self._num_waiting += 1
        self.seen.most_long_waiting = max(self.seen.most_long_waiting, self._num_waiting)
        is_first = True
        prompt = self._prompt(self._shape.long_prompt_tokens)
        async with aclosing(self._send(prompt, self._shape.long_output_tokens)) as chunks:
            async for _ in chunks:
                if is_first:
                    self._num_waiting -= 1
                    self.seen.long_first_s.append(self._now_s() - sent_s)
                is_first = False

    def _prompt(self, length: int) -> list[int]:
        return [self._draw.choice(self._vocabulary) for _ in range(length)]

    def _now_s(self) -> float:
        return time.perf_counter() - self._started_s


def summarize(seen: Seen, shape: LoadShape) -> dict[str, float]:
    """The quiet and the busy part of a run beside each other; NaN where nothing was seen.

    The first seconds, in which the streams' prompts are all computed at once, count for neither.
    """
    start_s, busy_s, end_s = min(5.0, shape.quiet_s / 3), shape.quiet_s, shape.quiet_s + shape.busy_s
    quiet_gaps = [gap_s for at_s, gap_s in seen.gaps if start_s <= at_s < busy_s]
    busy_gaps = [gap_s for at_s, gap_s in seen.gaps if busy_s <= at_s]
    quiet_rate = sum(count for at_s, count in seen.tokens if start_s <= at_s < busy_s) / (busy_s - start_s)
    busy_rate = sum(count for at_s, count in seen.tokens if busy_s <= at_s) / (end_s - busy_s)
    quiet_ms, busy_ms = percentile(quiet_gaps, 0.99) * 1e3, percentile(busy_gaps, 0.99) * 1e3
    return {
        "quiet_p99_itl_ms": quiet_ms,
        "busy_p99_itl_ms": busy_ms,
        "p99_ratio": busy_ms / quiet_ms,
        "steady_tok_ratio": busy_rate / quiet_rate if quiet_rate else math.nan,
        "short_ttft_p95_ms": percentile([took_s for at_s, took_s in seen.first_tokens if busy_s <= at_s], 0.95) * 1e3,
        "long_ttft_p50_ms": percentile(seen.long_first_s, 0.5) * 1e3,
        "quiet_tok_s": quiet_rate,
        "busy_tok_s": busy_rate,
        "long_sent": seen.num_long,
        "long_answered": len(seen.long_first_s),
        "most_long_waiting": seen.most_long_waiting,
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed; NaN when there are none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def median_of(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Key by key."""
    return {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}
