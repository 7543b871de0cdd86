"""Who gets the next request: selecting a worker and reserving its load there are one step, for all gateways at once.

Heartbeats are late and every gateway has its own, so alone they send a burst to one worker. The ledger knows what was
sent meanwhile. A reservation counts until the heartbeat that a decision is based on counts the request itself: each
decision brings, per candidate, which reservations its heartbeat has in it.

`PoolBook` is the whole of it without I/O; `memory_ledger.py` and `kv_store/redis_ledger.py` keep the same promise.
"""

import heapq
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from messages.errors import Unavailable
from messages.reservations import MAX_TTL_S, OVERTAKEN_S, Admitted, Candidate, Need, Reservation, check_ttl

__all__ = ["Admitted", "Candidate", "Ledger", "Load", "Need", "PoolBook", "Reservation", "total_cost"]

_MAX_LIVES = 8
"""Of one worker that are told apart; an earlier one that somebody still proposes is numbered anew."""


class Ledger(Protocol):
    """The reservations of all pools. An async context manager; leaving closes it.

    A worker must always be reserved under one pool name: two have nothing to do with each other.
    """

    @property
    def num_open(self) -> int:
        """Reservations that live in all pools used here, whoever made them, when they were last asked."""
        ...

    @property
    def num_expired(self) -> int:
        """Reservations whose TTL this ledger has seen run out before anybody released them."""
        ...

    @property
    def num_released(self) -> int:
        """Reservations that ended by `release` here."""
        ...

    @property
    def num_dropped(self) -> int:
        """Reservations that ended here with their worker."""
        ...

    async def reserve(
        self, pool: str, candidates: Sequence[Candidate], need: Need, *, nonce: str, ttl_s: float
    ) -> Reservation:
        """Choose the cheapest candidate, counting what is pending on each, and put `need` on it; one atomic step.

        An incarnation that comes up for the first time, chosen or not, ends the reservations of the worker's others.

        Args:
            pool: Whose ledger.
            candidates: From `pool`; the first of equally cheap ones is taken.
            need: What the request takes of the worker.
            nonce: Names the attempt. The same nonce gives the same reservation, without reserving anything new, until
                `ttl_s` after it was made, even when it has ended meanwhile.
            ttl_s: Ends the reservation if nothing else does.

        Raises:
            Unavailable: There is no candidate, or the nonce was released less than 10 s ago, before it was reserved.
            ConfigError: `ttl_s` is not in (0, 3600].
            RegistryError: The ledger does not answer; whether something was reserved is not known.
        """
        ...

    async def release(self, pool: str, nonce: str) -> bool:
        """End a reservation: its request has ended, or every gateway has had a heartbeat with it.

        It may overtake its reserve, when the caller of that has left; then nothing is reserved.

        Returns:
            Whether this call ended it; False when it had ended before or is not known.

        Raises:
            RegistryError: The ledger does not answer.
        """
        ...

    async def forget(self, pool: str, worker_id: str, incarnation: str) -> int:
        """End all reservations of a life of a worker that is dead; those of another life stay.

        Returns:
            How many.

        Raises:
            RegistryError: The ledger does not answer.
        """
        ...

    async def pending(self, pool: str) -> list[Reservation]:
        """Return the live reservations, in no order; walks the whole pool, so for views and tests.

        Raises:
            RegistryError: The ledger does not answer.
        """
        ...

    async def close(self) -> None:
        """Give connections back; the ledger is not usable afterwards."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is pending on one life of a worker and not in a heartbeat of it."""

    prefill_tokens: int = 0
    kv_tokens: int = 0
    num_requests: int = 0

    @classmethod
    def of(cls, reservations: Iterable[Reservation]) -> Self:
        """Sum reservations up."""
        rows = list(reservations)
        return cls(
            prefill_tokens=sum(row.prefill_tokens for row in rows),
            kv_tokens=sum(row.kv_tokens for row in rows),
            num_requests=len(rows),
        )


def total_cost(candidate: Candidate, pending: Load, need: Need) -> float:
    """Return the cost of a candidate with what is pending on it; the Redis ledger's script does the same sums."""
    per_lacking = candidate.cost_per_lacking_token
    lacking = max(0, pending.kv_tokens + need.kv_tokens - candidate.room_tokens)
    return (
        candidate.cost
        + candidate.cost_per_token * pending.prefill_tokens
        + candidate.cost_per_request * pending.num_requests
        + (candidate.cost_per_token if per_lacking is None else per_lacking) * lacking
    )


@dataclass(slots=True, kw_only=True)
class _Life:
    """One life of a worker; `open` has what is reserved on it and on no other."""

    issuer: str
    sequence: int = 0
    open: dict[str, Reservation] = field(default_factory=dict)
    """By nonce."""


@dataclass(slots=True, kw_only=True)
class _Worker:
    """Every life counts for itself: which of two is the later one, a ledger that lost its data could not say."""

    used_at_s: float
    lives: dict[str, _Life] = field(default_factory=dict)
    """By incarnation, the latest that came up last."""


class PoolBook:
    """The reservations of one pool: each is open and on one life of a worker, or over, and never comes back.

    Times come in as arguments, in seconds of any one clock, never going back.
    """

    def __init__(self, pool: str, make_issuer: Callable[[], str] = lambda: secrets.token_hex(8)) -> None:
        self._pool = pool
        self._make_issuer = make_issuer
        self._known: dict[str, Reservation | None] = {}
        """By nonce, until its end: what was reserved, over or not; None where the release came first."""
        self._ends: list[tuple[float, str]] = []
        self._workers: dict[str, _Worker] = {}
        """By worker id, the longest unused first."""
        self.num_open = 0
        self.num_expired = 0
        self.num_released = 0
        self.num_dropped = 0

    def reserve(
        self, candidates: Sequence[Candidate], need: Need, *, nonce: str, ttl_s: float, now_s: float
    ) -> Reservation:
        """Choose and reserve; see `Ledger.reserve`."""
        check_ttl(ttl_s)
        self.expire(now_s)
        if nonce in self._known:
            known = self._known[nonce]
            if known is None:
                raise Unavailable("released before it was reserved", pool=self._pool, nonce=nonce)
            return known
        if not candidates:
            raise Unavailable("no worker to reserve on", pool=self._pool)
        for candidate in candidates:
            self._meet(candidate)
        chosen = min(candidates, key=lambda candidate: total_cost(candidate, self._pending_for(candidate), need))
        life = self._used(chosen, now_s)
        life.sequence += 1
        reservation = Reservation(
            nonce=nonce,
            pool=self._pool,
            worker_id=chosen.worker_id,
            incarnation=chosen.incarnation,
            issuer=life.issuer,
            sequence=life.sequence,
            prefill_tokens=need.prefill_tokens,
            kv_tokens=need.kv_tokens,
        )
        life.open[nonce] = reservation
        self.num_open += 1
        self._remember(nonce, reservation, now_s + ttl_s)
        return reservation

    def find(self, nonce: str, now_s: float) -> Reservation | None:
        """Return what was reserved under `nonce` less than its TTL ago, whether it lives or not."""
        self.expire(now_s)
        return self._known.get(nonce)

    def release(self, nonce: str, now_s: float) -> bool:
        """End a reservation; see `Ledger.release`."""
        self.expire(now_s)
        if nonce not in self._known:
            self._remember(nonce, None, now_s + OVERTAKEN_S)
        is_ended = self._end(self._known[nonce])
        self.num_released += is_ended
        return is_ended

    def forget(self, worker_id: str, incarnation: str, now_s: float) -> int:
        """End all reservations of a dead worker's life; see `Ledger.forget`."""
        self.expire(now_s)
        life = self._life(worker_id, incarnation)
        return 0 if life is None else self._drop(life)

    def pending(self, now_s: float) -> list[Reservation]:
        """Return the live reservations."""
        self.expire(now_s)
        lives = (life for worker in self._workers.values() for life in worker.lives.values())
        return [reservation for life in lives for reservation in life.open.values()]

    def expire(self, now_s: float) -> None:
        """End what is past its TTL, and give up workers that nobody has used for long."""
        while self._ends and self._ends[0][0] <= now_s:
            self.num_expired += self._end(self._known.pop(heapq.heappop(self._ends)[1]))
        # Their reservations are over by now: none lives longer.
        while self._workers and self._workers[oldest := next(iter(self._workers))].used_at_s + MAX_TTL_S <= now_s:
            del self._workers[oldest]

    def _meet(self, candidate: Candidate) -> None:
        """Let a life that comes up for the first time end the reservations of those before it."""
        worker = self._workers.get(candidate.worker_id)
        if worker is None or candidate.incarnation in worker.lives:
            return
        for life in worker.lives.values():
            self._drop(life)
        worker.lives[candidate.incarnation] = _Life(issuer=self._make_issuer())
        if len(worker.lives) > _MAX_LIVES:
            del worker.lives[next(iter(worker.lives))]

    def _life(self, worker_id: str, incarnation: str) -> _Life | None:
        worker = self._workers.get(worker_id)
        return None if worker is None else worker.lives.get(incarnation)

    def _pending_for(self, candidate: Candidate) -> Load:
        life = self._life(candidate.worker_id, candidate.incarnation)
        if life is None:
            return Load()
        counted = next((seen for seen in candidate.admitted if seen.issuer == life.issuer), None)
        return Load.of(row for row in life.open.values() if counted is None or not counted.covers(row.sequence))

    def _used(self, candidate: Candidate, now_s: float) -> _Life:
        worker = self._workers.pop(candidate.worker_id, None) or _Worker(used_at_s=now_s)
        worker.used_at_s = now_s
        self._workers[candidate.worker_id] = worker
        if candidate.incarnation not in worker.lives:
            worker.lives[candidate.incarnation] = _Life(issuer=self._make_issuer())
        return worker.lives[candidate.incarnation]

    def _remember(self, nonce: str, reservation: Reservation | None, ends_at_s: float) -> None:
        self._known[nonce] = reservation
        heapq.heappush(self._ends, (ends_at_s, nonce))

    def _end(self, reservation: Reservation | None) -> bool:
        """Take a reservation off its worker; False when it was over."""
        life = None if reservation is None else self._life(reservation.worker_id, reservation.incarnation)
        if reservation is None or life is None or life.open.pop(reservation.nonce, None) is None:
            return False
        self.num_open -= 1
        return True

    def _drop(self, life: _Life) -> int:
        num_dropped = len(life.open)
        life.open.clear()
        self.num_open -= num_dropped
        self.num_dropped += num_dropped
        return num_dropped
