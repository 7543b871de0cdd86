"""What is reported of a load is what its clients saw."""

import asyncio
import math
import random
from collections.abc import AsyncGenerator, Sequence

import pytest

from benchmarks.steady_load import LoadShape, Seen, median_of, percentile, run_load, summarize

SHAPE = LoadShape(quiet_s=12, busy_s=10)


def test_quiet_and_busy_are_told_apart_and_the_first_seconds_count_for_neither() -> None:
    seen = Seen(
        gaps=[
            (1.0, 9.0),
            *((4.0 + 0.07 * n, 0.010) for n in range(100)),
            *((12.0 + 0.1 * n, 0.013) for n in range(100)),
        ],
        tokens=[(1.0, 1000), *((5.0, 8) for _ in range(10)), *((13.0, 9) for _ in range(10))],
        first_tokens=[(2.0, 5.0), (13.0, 0.2), (14.0, 0.4)],
        long_first_s=[20.0, 22.0, 30.0],
        num_long=4,
        most_long_waiting=2,
    )

    row = summarize(seen, SHAPE)

    assert row["quiet_p99_itl_ms"] == pytest.approx(10.0)
    assert row["busy_p99_itl_ms"] == pytest.approx(13.0)
    assert row["p99_ratio"] == pytest.approx(1.3)
    assert (row["quiet_tok_s"], row["busy_tok_s"]) == (10.0, 9.0)
    assert row["steady_tok_ratio"] == pytest.approx(0.9)
    assert row["short_ttft_p95_ms"] == pytest.approx(400.0)
    assert row["long_ttft_p50_ms"] == pytest.approx(22_000.0)
    assert (row["long_sent"], row["long_answered"], row["most_long_waiting"]) == (4, 3, 2)


@pytest.mark.parametrize(
    ("values", "share", "expected"), [([3.0, 1.0, 2.0], 0.5, 2.0), (list(range(100)), 0.99, 98), ([5.0], 0.99, 5.0)]
)
def test_a_percentile_is_one_of_the_values(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == expected


def test_nothing_seen_is_not_a_number() -> None:
    assert math.isnan(summarize(Seen(), SHAPE)["p99_ratio"])


def test_runs_are_summed_up_by_their_medians() -> None:
    assert median_of([{"a": 1.0, "b": 5.0}, {"a": 9.0, "b": 6.0}, {"a": 2.0, "b": 7.0}]) == {"a": 2.0, "b": 6.0}


class Server:
    """Chunks of two tokens; remembers what it was asked for."""

    def __init__(self) -> None:
        self.prompts: list[Sequence[int]] = []
        self.num_open = 0

    async def send(self, prompt: Sequence[int], num_new: int) -> AsyncGenerator[int, None]:
        self.prompts.append(prompt)
        self.num_open += 1
        try:
            for _ in range(num_new // 2):
                await asyncio.sleep(0.002)
                yield 2
        finally:
            self.num_open -= 1


async def test_streams_follow_each_other_and_long_prompts_come_in_time() -> None:
    server = Server()
    shape = LoadShape(
        quiet_s=0.1,
        busy_s=0.3,
        num_streams=2,
        prompt_tokens=5,
        output_tokens=10,
        long_prompt_tokens=50,
        long_every_s=0.2,
    )

    seen = await run_load(server.send, shape, random.Random(1), range(100))  # noqa: S311 - prompts, not secrets

    assert [len(prompt) for prompt in server.prompts].count(50) == seen.num_long == 2
    assert len(seen.first_tokens) > 4
    # Of two tokens that come together the second has no gap.
    assert len(seen.gaps) + len(seen.first_tokens) == sum(count for _, count in seen.tokens)
    assert server.num_open == 0


async def test_a_server_that_fails_ends_the_load() -> None:
    async def fail(_prompt: Sequence[int], _num_new: int) -> AsyncGenerator[int, None]:
        yield 1
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        await run_load(fail, LoadShape(quiet_s=5, busy_s=5), random.Random(1), range(9))  # noqa: S311 - prompts
