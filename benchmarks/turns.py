"""What two alternating sides of a comparison have done, turn by turn, and whether both did the same."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

MAX_COUNT_DIFFERENCE, MIN_COUNT_DIFFERENCE = 0.05, 0.01
"""Of commands per operation, relative and absolute: both sides draw from the same work, but not equally often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What one client did in a turn."""

    operations: int
    elapsed_s: float
    latencies_s: tuple[float, ...] = ()


class Side:
    """What one of the two compared has done so far."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        """Operations per second of all clients, per turn."""
        self.latencies_s: list[float] = []
        self._num_operations = 0
        self._calls: Counter[str] = Counter()

    @property
    def rate(self) -> float:
        """The median."""
        return statistics.median(self.rates)

    def add(self, done: Sequence[Done], calls: Counter[str]) -> None:
        """Take a turn of all clients, and the commands that the servers ran for it."""
        self.rates.append(rate_of(done))
        self.latencies_s += [latency_s for each in done for latency_s in each.latencies_s]
        self._num_operations += sum(each.operations for each in done)
        self._calls += calls

    def calls_per_operation(self) -> dict[str, float]:
        """How often one operation made the servers run each command."""
        return {name: count / self._num_operations for name, count in self._calls.items()}

    def check_same_commands(self, other: "Side") -> None:
        """See that an operation of either costs the servers the same commands.

        Raises:
            RuntimeError: It does not, so the comparison would say nothing.
        """
        ours, theirs = self.calls_per_operation(), other.calls_per_operation()
        for name in ours.keys() | theirs.keys():
            mine, bare = ours.get(name, 0.0), theirs.get(name, 0.0)
            if abs(mine - bare) > max(MIN_COUNT_DIFFERENCE, MAX_COUNT_DIFFERENCE * max(mine, bare)):
                raise RuntimeError(f"{name} per operation: ours {mine:.2f}, bare {bare:.2f}")


def rate_of(done: Sequence[Done]) -> float:
    """Operations per second of clients that ran side by side."""
    return sum(each.operations / each.elapsed_s for each in done)
