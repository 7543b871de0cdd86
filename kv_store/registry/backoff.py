"""When to ask again for what was not there: each pause is twice as long as the one before, up to a bound."""

import math
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Backoff:
    """Due at once after a success, and a pause after each failure."""

    first_s: float
    most_s: float
    due_s: float = field(default=-math.inf, init=False)
    """On the caller's clock."""
    _pause_s: float = field(default=0.0, init=False)

    def is_due(self, now_s: float) -> bool:
        """Whether the pause is over."""
        return now_s >= self.due_s

    def failed(self, now_s: float) -> None:
        """It was still not there."""
        self._pause_s = min(self.most_s, 2 * self._pause_s or self.first_s)
        self.due_s = now_s + self._pause_s

    def succeeded(self) -> None:
        """It is there, or something has changed."""
        self._pause_s, self.due_s = 0.0, -math.inf
