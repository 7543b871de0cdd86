"""How load is spread over lengths: a histogram in logarithmic bins whose past fades away; its size never changes."""

import math

import numpy as np

BINS_PER_OCTAVE = 32
NUM_OCTAVES = 24
"""Up to 16 million tokens; anything longer counts as that."""

_MAX_EXPONENT = 32.0
"""Weights grow instead of fading, and are scaled back when they have grown by two to this."""


class LengthHistogram:
    """Loads by length; each counts half after `half_life_s`."""

    def __init__(self, half_life_s: float, now_s: float) -> None:
        """Begin without any load.

        Args:
            half_life_s: How fast the past fades.
            now_s: The time, on the clock that later calls use.
        """
        self._half_life_s = half_life_s
        self._origin_s = now_s
        # By length: how many, their load, and the squares of their loads.
        self._counts, self._loads, self._squares = np.zeros((3, NUM_OCTAVES * BINS_PER_OCTAVE))

    def add(self, tokens: int, load: float, now_s: float) -> None:
        """Count one request of `tokens` tokens that is a load of `load`."""
        weight = self._weight(now_s)
        place = _place(tokens)
        self._counts[place] += weight
        self._loads[place] += weight * load
        self._squares[place] += (weight * load) ** 2

    def count(self, now_s: float) -> float:
        """Requests of the recent past, faded."""
        return float(self._counts.sum()) / self._weight(now_s)

    @property
    def effective_count(self) -> float:
        """Requests of equal load whose sum would be as uncertain as that of those seen (Kish's sample size)."""
        squares = float(self._squares.sum())
        return float(self._loads.sum()) ** 2 / squares if squares else 0.0

    def shares(self, boundaries: tuple[int, ...]) -> list[float]:
        """Share of the load in each of the ranges that end with `boundaries`, which are inclusive, and in the rest."""
        total = float(self._loads.sum())
        below = [self._load_below(boundary + 1) / total for boundary in boundaries] if total else []
        return [high - low for low, high in zip([0.0, *below], [*below, 1.0], strict=True)] if total else []

    def boundary(self, share: float) -> int:
        """The most tokens of a range that carries `share` of the load, as near as whole bins come to it.

        A boundary inside a bin would be a guess about where its load lies, wrong where many requests are alike.
        """
        below = np.concatenate([[0.0], np.cumsum(self._loads)])
        return _first_length(int(np.abs(below - share * below[-1]).argmin())) - 1

    def _load_below(self, tokens: int) -> float:
        """Load of the requests with fewer tokens; in a bin that is cut it counts as evenly spread over its lengths."""
        place = _place(tokens)
        first, end = _first_length(place), _first_length(place + 1)
        part = min(1.0, max(0, tokens - first) / max(1, end - first))
        return float(self._loads[:place].sum() + part * self._loads[place])

    def _weight(self, now_s: float) -> float:
        """What one request that is seen now counts in the sums."""
        exponent = (now_s - self._origin_s) / self._half_life_s
        if exponent > _MAX_EXPONENT:
            fade = 2.0**-exponent
            self._counts *= fade
            self._loads *= fade
            self._squares *= fade * fade
            self._origin_s, exponent = now_s, 0.0
        return float(2.0**exponent)


def _place(tokens: int) -> int:
    """The bin of a length."""
    return min(int(math.log2(max(1, tokens)) * BINS_PER_OCTAVE), NUM_OCTAVES * BINS_PER_OCTAVE - 1)


def _first_length(place: int) -> int:
    """The least whole number of tokens in a bin or above it."""
    return math.ceil(math.exp2(place / BINS_PER_OCTAVE))
