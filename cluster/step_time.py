"""How long a worker's steps take, learned from the steps it has made.

    step = base + prefill tokens * a + decode tokens * b + context tokens * c            (ms)

The four coefficients are fitted online by least squares over the relative error, so that a decode step of 20 ms counts
as much as a prompt's step of a second. Newer steps weigh more. Steps with and without prompt tokens are remembered
apart: an hour of decoding must not wear away what is known of prompts. What the steps leave open (two kinds of tokens
that always came together, a kind that never came) is taken from assumed proportions, at the speed that was seen.
"""

import math
from dataclasses import astuple, dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from telemetry.step_record import StepRecord

Floats = NDArray[np.float64]

_NUM_COEFFICIENTS = 4
MIN_DURATION_MS, MAX_DURATION_MS = 1e-3, 60_000.0
"""A longer step counts as one of a minute."""
KEPT_OF_SAME_KIND, KEPT_OF_OTHER_KIND = 0.99, 0.9998
"""What a step leaves of the weight of the earlier ones of its kind and of the other kind."""
MIN_SHARE = 0.01
"""No coefficient falls below this share of the assumed one, so nothing is ever free."""
_SCALE_WEIGHT = 0.05
"""Of the newest step in the mean of measured by assumed durations."""
_PRIOR_WEIGHT = 1e-3
"""Of the assumed proportions, in steps; small beside what any step says."""
_MIN_EXPECTED_SHARE = 0.5
"""Steps that were faster than this share of what was expected weigh no more than one that took so long."""
_MAX_LOG_SURPRISE = 1.0
"""By which one step may seem to be faster or slower than the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Coefficients of one worker's steps. The defaults are assumed before anything is measured."""

    base_ms: float = 5.0
    prefill_token_ms: float = 0.5
    decode_token_ms: float = 0.5
    context_token_ms: float = 5e-4
    """Per token that a row of the step attends to."""

    def step_ms(self, *, prefill_tokens: float, decode_tokens: float, context_tokens: float) -> float:
        """Predict the duration of one step."""
        return (
            self.base_ms
            + self.prefill_token_ms * prefill_tokens
            + self.decode_token_ms * decode_tokens
            + self.context_token_ms * context_tokens
        )

    @classmethod
    def from_array(cls, values: Floats) -> Self:
        """Make from base, prefill, decode and context, in ms."""
        base, prefill, decode, context = (float(value) for value in values)
        return cls(base_ms=base, prefill_token_ms=prefill, decode_token_ms=decode, context_token_ms=context)


ASSUMED = StepTimes()
_ASSUMED = np.array(astuple(ASSUMED))


class StepTimeFit:
    """Fed by the step thread, read by heartbeats; what it says is finite and positive whatever it was fed.

    Coefficients are kept as multiples of the assumed ones, and a step as the shares that the assumed ones would have in
    its measured duration: then all numbers are near one on a machine like the assumed one.
    """

    def __init__(self) -> None:
        empty = np.zeros((_NUM_COEFFICIENTS, _NUM_COEFFICIENTS + 1))
        self._num_steps = 0
        # Replaced as a whole, so that a reader in another thread never sees half a step.
        self._state: tuple[float, tuple[Floats, Floats]] = (0.0, (empty, empty))

    @property
    def is_measured(self) -> bool:
        """Whether any step has been seen."""
        return self._num_steps > 0

    def add(self, record: StepRecord) -> None:
        """Take in one step; one without a duration or without tokens says nothing."""
        features = np.array([1.0, record.prefill_tokens, record.decode_tokens, record.context_tokens])
        if not 0.0 < record.duration_ms < math.inf or features[1] + features[2] <= 0 or features.min() < 0:
            return
        duration_ms = min(max(record.duration_ms, MIN_DURATION_MS), MAX_DURATION_MS)
        expected = features * _ASSUMED
        log_scale, sums = self._state
        self._num_steps += 1
        log_ratio = math.log(duration_ms / expected.sum())
        surprise = log_ratio - log_scale
        if self._num_steps > 1:
            surprise = min(max(surprise, -_MAX_LOG_SURPRISE), _MAX_LOG_SURPRISE)
        log_scale += surprise * max(1.0 / self._num_steps, _SCALE_WEIGHT)
        # A step that seems to have taken no time must not outweigh all others.
        unit_ms = max(duration_ms, _MIN_EXPECTED_SHARE * math.exp(log_scale) * expected.sum())
        shares = expected / unit_ms
        # One column more than the normal equations: their right side.
        step = np.outer(shares, np.append(shares, duration_ms / unit_ms))
        without, with_prompt = sums
        if record.prefill_tokens > 0:
            sums = (without * KEPT_OF_OTHER_KIND, with_prompt * KEPT_OF_SAME_KIND + step)
        else:
            sums = (without * KEPT_OF_SAME_KIND + step, with_prompt * KEPT_OF_OTHER_KIND)
        self._state = (log_scale, sums)

    def times(self) -> StepTimes:
        """The best coefficients now; those assumed before the first step."""
        if not self._num_steps:
            return ASSUMED
        log_scale, (without, with_prompt) = self._state
        scale = math.exp(log_scale)
        normal = without + with_prompt
        matrix = normal[:, :-1] + np.eye(_NUM_COEFFICIENTS) * (_PRIOR_WEIGHT / scale**2)
        target = normal[:, -1] + _PRIOR_WEIGHT / scale
        return StepTimes.from_array(_ASSUMED * _solve_above(matrix, target, MIN_SHARE * scale))


def _solve_above(matrix: Floats, target: Floats, least: float) -> Floats:
    """Solve the normal equations with no unknown below `least`: those that would be are held there, worst first."""
    target = target - matrix.sum(axis=1) * least
    excess = np.zeros(len(target))
    free = np.ones(len(target), dtype=bool)
    while free.any():
        found = np.linalg.solve(matrix[np.ix_(free, free)], target[free])
        if found.min() >= 0:
            excess[free] = found
            break
        free[np.flatnonzero(free)[found.argmin()]] = False
    return excess + least
