"""Where the short requests end and the long ones begin: fixed, or moved so that every range is an equal load.

Load is token-seconds: tokens times the seconds that each of them takes of a worker. For a prefill those are the seconds
to compute a token; then equal load in proportion to capacity means that all pools are busy for the same share of the
time, which equal numbers of requests, or of lengths, would not give.

A boundary that follows noise would send the same prompt here and there and lose its cached prefix each time. So it
moves only when the loads differ by more than a tolerance *and* more than chance explains, and not soon again.

Source: size intervals of equal load (SITA-E), Harchol-Balter, Crovella and Murta 1999, "On Choosing a Task Assignment
Policy for a Distributed Server System".
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.length_histogram import LengthHistogram


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdRules:
    """How boundaries follow the lengths."""

    tolerance: float = 0.1
    """A range may carry so much more or less than its part, as a share of it."""
    num_deviations: float = 2.0
    """And so many standard deviations of what was observed."""
    min_requests: float = 200.0
    """Before so many were seen, and have not faded, nothing moves."""
    half_life_s: float = 600.0
    """A request counts half after so long."""
    hold_s: float = 60.0
    """Boundaries stay for at least so long."""


class Thresholds(Protocol):
    """Boundaries between ranges of lengths."""

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The most tokens of each range but the last, ascending."""
        ...

    def observe(self, tokens: int, seconds_each: float = 1.0) -> None:
        """Take note of a request of `tokens` tokens, each of which takes `seconds_each` of a worker."""
        ...

    def adapt(self, capacities: Sequence[float]) -> bool:
        """Move the boundaries if they should be elsewhere.

        Args:
            capacities: What the workers of each range can do per second, all in the same unit.

        Returns:
            Whether they moved.
        """
        ...


class FixedThresholds:
    """Boundaries that the config gives."""

    def __init__(self, boundaries: Sequence[int]) -> None:
        self.boundaries = tuple(boundaries)

    def observe(self, tokens: int, seconds_each: float = 1.0) -> None:
        """Nothing depends on what is observed."""

    def adapt(self, capacities: Sequence[float]) -> bool:
        """They stay."""
        return False


class AdaptiveThresholds:
    """Boundaries that follow the lengths seen; always strictly ascending, the first at least 1."""

    def __init__(self, boundaries: Sequence[int], rules: ThresholdRules, clock: Callable[[], float]) -> None:
        """Begin with `boundaries`.

        Args:
            boundaries: The most tokens of each range but the last, strictly ascending, the first at least 1.
            rules: How to follow.
            clock: Seconds, monotonic.
        """
        self._boundaries = tuple(boundaries)
        self._rules = rules
        self._clock = clock
        self._lengths = LengthHistogram(rules.half_life_s, clock())
        self._moved_s = -math.inf

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The most tokens of each range but the last."""
        return self._boundaries

    def observe(self, tokens: int, seconds_each: float = 1.0) -> None:
        """Take note of a request; see Thresholds."""
        self._lengths.add(tokens, tokens * seconds_each, self._clock())

    def adapt(self, capacities: Sequence[float]) -> bool:
        """Move the boundaries if the loads are uneven; see Thresholds. While a range has no capacity they stay."""
        assert len(capacities) == len(self._boundaries) + 1, "one capacity for each range"
        now_s = self._clock()
        is_settled = now_s - self._moved_s < self._rules.hold_s
        if is_settled or min(capacities) <= 0 or self._lengths.count(now_s) < self._rules.min_requests:
            return False
        parts = [capacity / sum(capacities) for capacity in capacities]
        if not self._is_uneven(parts):
            return False
        target = self._balanced(parts)
        if target == self._boundaries:
            return False
        self._boundaries, self._moved_s = target, now_s
        return True

    def loads(self, capacities: Sequence[float]) -> list[float]:
        """Load of each range per capacity, 1 where all are equal; empty before anything was seen."""
        shares = self._lengths.shares(self._boundaries)
        return [share * sum(capacities) / own for share, own in zip(shares, capacities, strict=True)] if shares else []

    def _balanced(self, parts: Sequence[float]) -> tuple[int, ...]:
        """Boundaries with which each range carries its part."""
        found: list[int] = []
        below = 0.0
        for part in parts[:-1]:
            below += part
            found.append(max(self._lengths.boundary(below), found[-1] + 1 if found else 1))
        return tuple(found)

    def _is_uneven(self, parts: Sequence[float]) -> bool:
        shares = self._lengths.shares(self._boundaries)
        if not shares:
            return False
        noise = self._rules.num_deviations / math.sqrt(self._lengths.effective_count)
        return any(
            abs(share - part) > self._rules.tolerance * part + noise * math.sqrt(part * (1.0 - part))
            for share, part in zip(shares, parts, strict=True)
        )
