"""A ledger inside one process: for one gateway, for tests, and for every gateway while the shared one is gone."""

import time
from collections.abc import Callable, Sequence
from typing import Self

from cluster.ledger import PoolBook
from messages.reservations import Candidate, Need, Reservation


class MemoryLedger:
    """Keeps the promises of `Ledger` on an injected clock, for those who share the object."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._books: dict[str, PoolBook] = {}

    @property
    def num_open(self) -> int:
        """Reservations that live now."""
        now_s = self._clock()
        for book in self._books.values():
            book.expire(now_s)
        return sum(book.num_open for book in self._books.values())

    @property
    def num_expired(self) -> int:
        """Reservations that their TTL has ended so far."""
        return sum(book.num_expired for book in self._books.values())

    @property
    def num_released(self) -> int:
        """Reservations that were released so far."""
        return sum(book.num_released for book in self._books.values())

    @property
    def num_dropped(self) -> int:
        """Reservations that have ended with their worker so far."""
        return sum(book.num_dropped for book in self._books.values())

    async def reserve(
        self, pool: str, candidates: Sequence[Candidate], need: Need, *, nonce: str, ttl_s: float
    ) -> Reservation:
        """Choose the cheapest candidate and reserve on it; see `Ledger.reserve`."""
        return self._book(pool).reserve(candidates, need, nonce=nonce, ttl_s=ttl_s, now_s=self._clock())

    def find(self, pool: str, nonce: str) -> Reservation | None:
        """Return what was reserved here under `nonce` less than its TTL ago, whether it lives or not."""
        return self._book(pool).find(nonce, self._clock())

    async def release(self, pool: str, nonce: str) -> bool:
        """End a reservation; see `Ledger.release`."""
        return self._book(pool).release(nonce, self._clock())

    async def forget(self, pool: str, worker_id: str, incarnation: str) -> int:
        """End all reservations of a dead worker's life; see `Ledger.forget`."""
        return self._book(pool).forget(worker_id, incarnation, self._clock())

    async def pending(self, pool: str) -> list[Reservation]:
        """Return the live reservations."""
        return self._book(pool).pending(self._clock())

    async def close(self) -> None:
        """Keep everything: others in the process may still use it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _book(self, pool: str) -> PoolBook:
        return self._books.setdefault(pool, PoolBook(pool))
