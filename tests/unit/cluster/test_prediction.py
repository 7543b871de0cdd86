"""Predictions against an engine that makes its steps one by one: decodes first, prompts in chunks fill the rest."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.pools import PoolSpec
from cluster.prediction import prompt_times
from cluster.snapshot import Snapshot, WorkerFacts, WorkerLoad
from cluster.step_time import StepTimes

TIMES = StepTimes(base_ms=20.0, prefill_token_ms=1.5, decode_token_ms=1.0, context_token_ms=0.002)


@dataclass
class Prompt:
    tokens: int
    computed: int = 0


@dataclass(frozen=True)
class Shape:
    """A worker: its decodes, what they attend to, and its limits."""

    decodes: int = 0
    context_tokens: int = 0
    chunk_tokens: int = 512
    step_tokens: int = 512


def simulated_ms(times: StepTimes, tokens: list[int], shape: Shape) -> tuple[float, float]:
    """Time until the last of these prompts has its token 1, and until all have."""
    queue = [Prompt(each) for each in tokens]
    now_ms, last, last_ms = 0.0, queue[-1], 0.0
    while queue:
        room, chunks = shape.step_tokens - shape.decodes, []
        for prompt in queue:
            size = min(prompt.tokens - prompt.computed, room, shape.chunk_tokens)
            if size <= 0:
                break
            chunks.append((prompt, size))
            room -= size
        for prompt, size in chunks:
            prompt.computed += size
        now_ms += times.step_ms(
            prefill_tokens=sum(size for _, size in chunks),
            decode_tokens=shape.decodes,
            context_tokens=shape.context_tokens + sum(prompt.computed for prompt, _ in chunks),
        )
        queue = [prompt for prompt in queue if prompt.computed < prompt.tokens]
        if last_ms == 0.0 and last not in queue:
            last_ms = now_ms
    return last_ms, now_ms


def predicted_ms(times: StepTimes, tokens: list[int], shape: Shape) -> float:
    """Time until the last one has its token 1, from what a heartbeat says of the others."""
    snapshot = Snapshot((PoolSpec(name="both", role="unified"),))
    facts = WorkerFacts(
        worker_id="w",
        incarnation="i",
        pool="both",
        step_tokens=shape.step_tokens,
        chunk_tokens=shape.chunk_tokens,
    )
    load = WorkerLoad(
        queued_prefill_tokens=sum(tokens[:-1]),
        running=shape.decodes,
        context_tokens=shape.context_tokens,
        times=times,
    )
    snapshot.update(facts, load)
    return float(prompt_times(snapshot.columns, tokens[-1], np.array([float(tokens[-1])])).ttft_ms[0])


SOME_PROMPTS = st.lists(st.integers(1, 4000), min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(tokens=SOME_PROMPTS, decodes=st.integers(0, 48), context=st.integers(0, 500))
def test_where_a_prompt_may_fill_a_step_the_prediction_is_that_of_the_steps_one_by_one(
    tokens: list[int], decodes: int, context: int
) -> None:
    shape = Shape(decodes, decodes * context)

    exact, _ = simulated_ms(TIMES, tokens, shape)

    # Chunks are counted as fractions, so that costs are continuous; prompts share their first and last steps.
    assert predicted_ms(TIMES, tokens, shape) == pytest.approx(exact, rel=0.15, abs=len(tokens) * step_ms(shape))


@settings(max_examples=150, deadline=None)
@given(
    tokens=SOME_PROMPTS, decodes=st.integers(0, 48), context=st.integers(0, 500), chunk=st.sampled_from([64, 128, 256])
)
def test_where_several_prompts_share_a_step_the_prediction_lies_between_this_one_s_end_and_everybody_s(
    tokens: list[int], decodes: int, context: int, chunk: int
) -> None:
    """A heartbeat does not say how the queued tokens are divided among prompts."""
    shape = Shape(decodes, decodes * context, chunk)

    own, everybody = simulated_ms(TIMES, tokens, shape)

    slack = len(tokens) * step_ms(shape)
    assert own * 0.85 - slack <= predicted_ms(TIMES, tokens, shape) <= everybody * 1.15 + slack


def step_ms(shape: Shape) -> float:
    """Of a full one."""
    return TIMES.step_ms(
        prefill_tokens=shape.step_tokens - shape.decodes,
        decode_tokens=shape.decodes,
        context_tokens=shape.context_tokens + 4000,
    )


def test_a_prompt_of_one_chunk_alone_is_predicted_exactly() -> None:
    shape = Shape(8, 4000)

    exact, _ = simulated_ms(TIMES, [400], shape)

    # Half a chunk's context less: a chunk attends to what is there when it ends.
    assert predicted_ms(TIMES, [400], shape) == pytest.approx(exact - 0.002 * 200)


def test_a_longer_context_makes_the_later_chunks_slower() -> None:
    times = replace(TIMES, context_token_ms=0.02)

    alone = predicted_ms(times, [8000], Shape())

    assert alone == pytest.approx(simulated_ms(times, [8000], Shape())[0], rel=0.03)
    assert alone > 2 * predicted_ms(times, [4000], Shape())
