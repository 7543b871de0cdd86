"""Faults on purpose: what is planned for a point happens when the code passes it, and costs nothing otherwise.

One `Faults` is made per process from its environment, and handed down as an argument.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from messages.errors import ServingError
from messages.fault_plan import Action, FaultRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Fired:
    """What a pass through a point has to do; each field is off when no rule fires."""

    delay_s: float = 0.0
    skew_s: float = 0.0
    throttle_gb_s: float | None = None
    is_killed: bool = False
    is_error: bool = False
    is_dropped: bool = False
    is_duplicated: bool = False
    is_corrupt: bool = False


NOTHING = Fired()


class Faults:
    """A fixed plan and, per rule, how often its point was passed.

    Passes may come from any thread; two at the same moment may count as one.

    Args:
        rules: The whole plan.
        pool: The pool of this worker; rules for other pools are left out.
        kill: Ends this process at once.
    """

    def __init__(
        self, rules: Sequence[FaultRule] = (), *, pool: str | None = None, kill: Callable[[], None] | None = None
    ) -> None:
        self._rules: dict[str, list[FaultRule]] = {}
        self._kill = kill or _kill_process
        for rule in rules:
            if rule.pool in (None, pool):
                self._rules.setdefault(rule.point, []).append(rule)
        self._passes = dict.fromkeys(self._rules, 0)
        self.is_set = bool(self._rules)
        """False: no point ever does anything; hot code asks this first."""

    def __str__(self) -> str:
        return ",".join(str(rule) for rules in self._rules.values() for rule in rules)

    def has(self, prefix: str) -> bool:
        """Whether any rule is for a point whose name begins so."""
        return any(point.startswith(prefix) for point in self._rules)

    def fire(self, point: str) -> Fired:
        """Count a pass and say what it has to do, without doing it."""
        rules = self._rules.get(point)
        if rules is None:
            return NOTHING
        self._passes[point] = number = self._passes[point] + 1
        due = {
            rule.action: rule.value or 0.0
            for rule in rules
            if number > rule.skip and (rule.times is None or number <= rule.skip + rule.times)
        }
        return Fired(
            delay_s=due.get(Action.DELAY, 0.0),
            skew_s=due.get(Action.SKEW, 0.0),
            throttle_gb_s=due.get(Action.THROTTLE),
            is_killed=Action.KILL in due,
            is_error=Action.ERROR in due,
            is_dropped=Action.DROP in due,
            is_duplicated=Action.DUPLICATE in due,
            is_corrupt=Action.CORRUPT in due,
        )

    def kill_if(self, fired: Fired) -> None:
        """End this process by SIGKILL when the pass has to."""
        if fired.is_killed:
            self._kill()

    async def at(self, point: str, error: type[ServingError] = ServingError) -> Fired:
        """Pass a point: wait, die or raise as planned; what is left for the caller comes back.

        Raises:
            ServingError: Of class `error`, as planned.
        """
        if not self.is_set:
            return NOTHING
        fired = self.fire(point)
        if fired.delay_s:
            await asyncio.sleep(fired.delay_s)
        self._finish(point, fired, error)
        return fired

    def at_blocking(self, point: str, error: type[ServingError] = ServingError) -> Fired:
        """Pass a point on a thread that may block; otherwise as `at`."""
        if not self.is_set:
            return NOTHING
        fired = self.fire(point)
        if fired.delay_s:
            time.sleep(fired.delay_s)
        self._finish(point, fired, error)
        return fired

    def skewed(self, clock: Callable[[], float]) -> Callable[[], float]:
        """Put the skew of point `clock` on a clock; the same one comes back when none is planned."""
        return (lambda: clock() + self.fire("clock").skew_s) if self.has("clock") else clock

    def _finish(self, point: str, fired: Fired, error: type[ServingError]) -> None:
        self.kill_if(fired)
        if fired.is_error:
            raise error("a fault was asked for here", point=point)


def _kill_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


NO_FAULTS = Faults()
