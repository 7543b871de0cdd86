import math
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.step_time import ASSUMED, MAX_DURATION_MS, StepTimeFit, StepTimes
from telemetry.step_record import StepRecord

TRUE = StepTimes(base_ms=27.0, prefill_token_ms=3.2, decode_token_ms=1.5, context_token_ms=0.004)
"""Of a worker that is much slower than the assumed one, and in other proportions."""

FAST = StepTimes(base_ms=8.0, prefill_token_ms=0.02, decode_token_ms=0.05, context_token_ms=2e-5)
"""Of an accelerator: a step takes its time, tokens hardly add to it."""


def record(prefill: int, decode: int, context: int, duration_ms: float) -> StepRecord:
    return StepRecord(
        at_s=0.0,
        prefill_tokens=prefill,
        decode_tokens=decode,
        context_tokens=context,
        num_rows=1,
        duration_ms=duration_ms,
    )


def steps(times: StepTimes, number: int, noise: float = 0.0, seed: int = 1) -> list[StepRecord]:
    """Mixed steps of one worker: decodes, prompts, both."""
    draw = np.random.default_rng(seed)
    made = []
    for index in range(number):
        decode = int(draw.integers(0, 32)) if index % 3 else 0
        prefill = int(draw.integers(16, 512)) if index % 3 != 1 or not decode else 0
        context = int(draw.integers(1, 2000) * (decode + (prefill > 0)))
        exact = times.step_ms(prefill_tokens=prefill, decode_tokens=decode, context_tokens=context)
        made.append(record(prefill, decode, context, exact * (1.0 + noise * draw.standard_normal())))
    return made


def fitted(records: list[StepRecord]) -> StepTimes:
    fit = StepTimeFit()
    for each in records:
        fit.add(each)
    return fit.times()


def test_before_any_step_the_assumed_times_hold() -> None:
    fit = StepTimeFit()

    assert not fit.is_measured
    assert fit.times() == ASSUMED


@pytest.mark.parametrize("true", [TRUE, FAST], ids=["slow", "fast"])
def test_the_coefficients_are_recovered_from_exact_steps(true: StepTimes) -> None:
    found = fitted(steps(true, 300))

    assert astuple(found) == pytest.approx(astuple(true), rel=0.03)


def test_noise_of_a_tenth_leaves_predictions_within_a_tenth() -> None:
    found = fitted(steps(TRUE, 600, noise=0.1))

    for prefill, decode, context in ((512, 0, 512), (0, 8, 8000), (256, 16, 20_000)):
        shape = {"prefill_tokens": prefill, "decode_tokens": decode, "context_tokens": context}
        assert found.step_ms(**shape) == pytest.approx(TRUE.step_ms(**shape), rel=0.1)


def test_a_worker_that_becomes_slower_is_followed_within_some_hundred_steps() -> None:
    fit = StepTimeFit()
    for each in steps(TRUE, 1000):
        fit.add(each)
    slower = StepTimes(base_ms=54.0, prefill_token_ms=9.6, decode_token_ms=1.5, context_token_ms=0.004)
    for each in steps(slower, 900, seed=2):
        fit.add(each)

    assert astuple(fit.times()) == pytest.approx(astuple(slower), rel=0.1)


def test_an_hour_of_decoding_does_not_wear_away_what_a_prompt_takes() -> None:
    fit = StepTimeFit()
    for each in steps(TRUE, 300):
        fit.add(each)
    for each in steps(TRUE, 20_000, noise=0.05):
        if each.prefill_tokens == 0:
            fit.add(each)

    assert fit.times().prefill_token_ms == pytest.approx(TRUE.prefill_token_ms, rel=0.1)


def test_what_was_never_seen_is_as_slow_as_the_rest() -> None:
    """A worker that has only decoded, at ten times the assumed time, is expected to prefill at ten times that too."""
    slow = StepTimes(**{name: 10 * value for name, value in zip(StepTimes.__slots__, astuple(ASSUMED), strict=True)})

    found = fitted([each for each in steps(slow, 500) if each.prefill_tokens == 0])

    assert found.prefill_token_ms == pytest.approx(10 * ASSUMED.prefill_token_ms, rel=0.2)


def test_equal_steps_are_predicted_though_they_tell_nothing_apart() -> None:
    found = fitted([record(0, 4, 4000, 40.0)] * 500)

    assert found.step_ms(prefill_tokens=0, decode_tokens=4, context_tokens=4000) == pytest.approx(40.0, rel=0.01)
    assert all(0 < value < 40 for value in astuple(found))


@pytest.mark.parametrize("duration_ms", [0.0, -1.0, math.inf, math.nan])
def test_a_step_without_a_duration_says_nothing(duration_ms: float) -> None:
    fit = StepTimeFit()

    fit.add(record(10, 1, 100, duration_ms))

    assert not fit.is_measured


def test_an_empty_step_says_nothing() -> None:
    fit = StepTimeFit()

    fit.add(record(0, 0, 0, 5.0))

    assert not fit.is_measured


def test_one_step_that_stalled_or_took_no_time_does_not_outweigh_the_others() -> None:
    for odd_ms in (1e-9, 1e9):
        fit = StepTimeFit()
        for each in steps(TRUE, 300):
            fit.add(each)
        fit.add(record(64, 4, 1000, odd_ms))

        assert fit.times().step_ms(prefill_tokens=256, decode_tokens=0, context_tokens=256) == pytest.approx(
            TRUE.step_ms(prefill_tokens=256, decode_tokens=0, context_tokens=256), rel=0.15
        )


@settings(max_examples=60, deadline=None)
@given(
    stream=st.lists(
        st.tuples(
            st.integers(0, 100_000),
            st.integers(0, 10_000),
            st.integers(0, 10**9),
            st.floats(allow_nan=True, allow_infinity=True),
        ),
        max_size=60,
    )
)
def test_whatever_comes_the_times_stay_positive_and_bounded(
    stream: list[tuple[int, int, int, float]],
) -> None:
    fit = StepTimeFit()
    for prefill, decode, context, duration_ms in stream:
        fit.add(record(prefill, decode, context, duration_ms))

    values = astuple(fit.times())

    assert all(math.isfinite(value) and value > 0 for value in values)
    # The dearest thing that a step can have done is one token in a minute.
    assert max(values) <= 2 * MAX_DURATION_MS / min(astuple(ASSUMED)) * max(astuple(ASSUMED))
