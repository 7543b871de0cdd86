"""Who may begin now, who waits, and who is told at once to come again; bounded in requests and in tokens.

Requests that run together hold no more than a budget of tokens; others wait in a line that is bounded, too. Room goes
to the lowest priority value, then to who came first; what does not fit lets others pass. Lest they pass for ever, a
request that would otherwise not begin within `max_wait_s` is *due*: only more urgent ones begin before it.
Source of passing within bounds: EASY backfilling, Lifka 1995, "The ANL/IBM SP Scheduling System".

Nothing here waits itself: every call returns what it has changed, and the caller tells those whom it concerns.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby

from messages.errors import DeadlineExceeded, Overloaded, ServingError, Unavailable

_FADE = 1.0 - 1.0 / 64.0
"""How long requests run is remembered of about the last 64."""
_MARGIN = 1.25
"""Making room takes up to so many times of what it takes on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRules:
    """The bounds."""

    max_requests: int = 256
    """Running and waiting ones together."""
    max_waiting_tokens: int | None = None
    """Of the requests in the line; None: as many as the budget."""
    max_wait_s: float = 10.0
    """Others of its priority pass a request no longer than that it can still begin within this."""
    min_retry_s: float = 1.0
    """Least time after which a refused request is told to come again."""
    max_retry_s: float = 60.0
    """Most of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What one request needs."""

    request_id: str
    tokens: int
    """That it holds while it runs."""
    priority: int = 0
    """Lower goes first."""
    timeout_s: float | None = None
    """It must begin within this; None: whenever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A request that is refused; it holds nothing."""

    request_id: str
    error: ServingError
    """Overloaded or Unavailable, with `retry_after_s` in the context, or DeadlineExceeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What a call has changed; a request that it does not name goes on as before, waiting or running."""

    begun: tuple[str, ...] = ()
    """Those that run from now on, in this order."""
    refused: tuple[Refusal, ...] = ()


@dataclass(order=True, slots=True, kw_only=True)
class _Waiting:
    priority: int
    number: int
    """Of its arrival."""
    ask: Ask = field(compare=False)
    arrived_s: float = field(compare=False)
    is_due: bool = field(default=False, compare=False)
    """Once it is, it stays so: what is given back to it must not go to others."""


class Admission:
    """A line before a budget of tokens.

    Every request that entered runs, waits or is gone, never two of them; those that run fit the budget together, or
    one that is larger than the budget runs alone.
    """

    def __init__(self, rules: AdmissionRules, budget_tokens: int, clock: Callable[[], float]) -> None:
        """Begin empty.

        Args:
            rules: The bounds.
            budget_tokens: Tokens of the requests that run together; 0: there is no worker.
            clock: Seconds, monotonic.
        """
        self._rules = rules
        self._budget = budget_tokens
        self._clock = clock
        self._running: dict[str, tuple[int, float]] = {}
        """Tokens, and when it began."""
        self._running_tokens = 0
        self._line: list[_Waiting] = []
        self._num_arrived = 0
        self._given_back = 0.0
        self._token_seconds = 0.0

    @property
    def num_running(self) -> int:
        """Requests that have begun and not left."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the line."""
        return len(self._line)

    @property
    def running_tokens(self) -> int:
        """Tokens of those that run."""
        return self._running_tokens

    @property
    def waiting_tokens(self) -> int:
        """Tokens of those in the line."""
        return sum(waiting.ask.tokens for waiting in self._line)

    @property
    def drain_tokens_s(self) -> float | None:
        """Tokens that are given back per second while the budget is used up; None before any were."""
        if self._token_seconds <= 0 or self._budget <= 0:
            return None
        return self._budget * self._given_back / self._token_seconds

    def enter(self, ask: Ask) -> Changes:
        """Let a request begin, put it into the line, or refuse it; the changes say which, of others as well.

        A line that is full keeps the most urgent: it refuses from its end, the newcomer or others.

        Args:
            ask: Its id is not inside already.
        """
        now_s = self._clock()
        if self._budget <= 0:
            return Changes(refused=(Refusal(request_id=ask.request_id, error=self._no_worker()),))
        waiting = _Waiting(priority=ask.priority, number=self._num_arrived, ask=ask, arrived_s=now_s)
        self._num_arrived += 1
        insort(self._line, waiting)
        refused = self._late(now_s)
        begun = self._begin(now_s)
        if waiting in self._line:
            refused += self._hopeless(waiting)
        return Changes(begun=begun, refused=tuple(refused + self._too_many()))

    def leave(self, request_id: str) -> Changes:
        """Give back what a request holds, whether it ran or waited; again, or for a refused one, it does nothing."""
        now_s = self._clock()
        if request_id in self._running:
            tokens, began_s = self._running.pop(request_id)
            self._running_tokens -= tokens
            self._given_back = self._given_back * _FADE + tokens
            self._token_seconds = self._token_seconds * _FADE + tokens * (now_s - began_s)
        else:
            self._line = [waiting for waiting in self._line if waiting.ask.request_id != request_id]
        return self._next(now_s)

    def expire(self) -> Changes:
        """Refuse those whose time is over; call it once in a while, or at each one's time."""
        return self._next(self._clock())

    def set_budget(self, budget_tokens: int) -> Changes:
        """Follow the workers that come and go; with 0 nobody can be served, and whoever waits is told so."""
        self._budget = budget_tokens
        if budget_tokens > 0:
            return self._next(self._clock())
        gone, self._line = self._line, []
        return Changes(refused=tuple(Refusal(request_id=w.ask.request_id, error=self._no_worker()) for w in gone))

    def _next(self, now_s: float) -> Changes:
        refused = self._late(now_s)
        return Changes(begun=self._begin(now_s), refused=tuple(refused))

    def _begin(self, now_s: float) -> tuple[str, ...]:
        """Let those begin whose turn it is."""
        begun: list[str] = []
        while (waiting := self._first(now_s)) is not None:
            self._line.remove(waiting)
            self._running[waiting.ask.request_id] = (waiting.ask.tokens, now_s)
            self._running_tokens += waiting.ask.tokens
            begun.append(waiting.ask.request_id)
        return tuple(begun)

    def _first(self, now_s: float) -> _Waiting | None:
        """Who begins next; None: nobody can."""
        for _, group in groupby(self._line, key=lambda waiting: waiting.priority):
            equals = list(group)
            self._mark_due(equals, now_s)
            due = next((waiting for waiting in equals if waiting.is_due), None)
            if due is not None:
                return due if self._fits(due.ask) else None
            fitting = next((waiting for waiting in equals if self._fits(waiting.ask)), None)
            if fitting is not None:
                return fitting
        return None

    def _fits(self, ask: Ask) -> bool:
        if len(self._running) >= self._rules.max_requests:
            return False
        return not self._running or self._running_tokens + ask.tokens <= self._budget

    def _mark_due(self, line: list[_Waiting], now_s: float) -> None:
        for waiting in line:
            needed_s = self._drain_s(self._running_tokens + waiting.ask.tokens - self._budget)
            # Until it is known how fast room is made, half of the time is kept for it.
            latest_s = self._rules.max_wait_s / 2 if needed_s is None else self._rules.max_wait_s - needed_s
            waiting.is_due |= now_s - waiting.arrived_s >= latest_s

    def _drain_s(self, tokens: float) -> float | None:
        """How long it takes until so many tokens have been given back; None: not known yet."""
        rate = self.drain_tokens_s
        return None if rate is None else _MARGIN * max(0.0, tokens) / rate

    def _late(self, now_s: float) -> list[Refusal]:
        late = [w for w in self._line if w.ask.timeout_s is not None and now_s - w.arrived_s >= w.ask.timeout_s]
        self._line = [waiting for waiting in self._line if waiting not in late]
        error = "the request's time was over before it could begin"
        return [
            Refusal(request_id=w.ask.request_id, error=DeadlineExceeded(error, timeout_s=w.ask.timeout_s)) for w in late
        ]

    def _hopeless(self, waiting: _Waiting) -> list[Refusal]:
        """Refuse a newcomer that cannot begin in time, by how fast tokens are given back."""
        timeout_s = waiting.ask.timeout_s
        ahead = sum(other.ask.tokens for other in self._line if other <= waiting)
        lacking = self._running_tokens + ahead - self._budget
        needed_s = self._drain_s(lacking)
        if timeout_s is None or needed_s is None or needed_s < timeout_s:
            return []
        self._line.remove(waiting)
        return [self._overloaded(waiting.ask, "timeout_s", lacking * (1.0 - timeout_s / needed_s))]

    def _too_many(self) -> list[Refusal]:
        """Refuse from the end of the line until it keeps its bounds."""
        refused: list[Refusal] = []
        most = self._budget if self._rules.max_waiting_tokens is None else self._rules.max_waiting_tokens
        while self._line:
            # One that is larger than the bound may wait, but only alone.
            excess = self.waiting_tokens - most if len(self._line) > 1 else 0
            if len(self._line) + len(self._running) > self._rules.max_requests:
                ask = self._line.pop().ask
                mean = self._running_tokens / len(self._running) if self._running else 0.0
                refused.append(self._overloaded(ask, "max_requests", mean))
            elif excess > 0:
                refused.append(self._overloaded(self._line.pop().ask, "max_waiting_tokens", excess))
            else:
                break
        return refused

    def _overloaded(self, ask: Ask, bound: str, excess_tokens: float) -> Refusal:
        """Refuse by a bound that holds again when `excess_tokens` have been given back."""
        wait_s = self._drain_s(excess_tokens) or 0.0
        retry_after_s = min(self._rules.max_retry_s, max(self._rules.min_retry_s, wait_s))
        error = Overloaded("too many requests wait already", bound=bound, retry_after_s=retry_after_s)
        return Refusal(request_id=ask.request_id, error=error)

    def _no_worker(self) -> Unavailable:
        return Unavailable("no worker takes requests now", retry_after_s=self._rules.min_retry_s)
