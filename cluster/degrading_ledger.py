"""A gateway's ledger: the shared one while it answers, this gateway's own view while it does not.

Alone, a gateway still spreads what it sends itself; what others send it learns from heartbeats. Each pool degrades by
itself, because its ledger lies on one shard. A reservation ends where it was made.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from cluster.ledger import Ledger
from cluster.memory_ledger import MemoryLedger
from messages.errors import RegistryError
from messages.reservations import Candidate, Need, Reservation

__all__ = ["DegradingLedger", "LedgerPatience"]

log = logging.getLogger(__name__)

_MAX_OWED = 4096
_NOBODY = "nobody"
"""Asked to forget nobody, a ledger that answers says so."""
_FAILURES = (RegistryError, TimeoutError)
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerPatience:
    """How long a gateway waits for the shared ledger."""

    timeout_s: float = 0.25
    """For one answer; then the request goes on with the local view."""
    first_wait_s: float = 0.2
    """Before a ledger that failed is asked again; doubles with every failure."""
    max_wait_s: float = 5.0


class DegradingLedger:
    """A `Ledger` that answers whether Redis does or not; only `Unavailable` and `ConfigError` leave it.

    A pool is shared, or it is degraded and has exactly one task that asks for the shared ledger again.
    """

    def __init__(
        self,
        shared: Ledger,
        *,
        patience: LedgerPatience | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        random_share: Callable[[], float] = random.random,
    ) -> None:
        """Begin with the shared ledger.

        Args:
            shared: Closed with this one.
            patience: Deadlines and waits.
            clock: For the TTL of local reservations.
            sleep: How to wait before asking again.
            random_share: In [0, 1), keeps gateways from asking all at once.
        """
        self._shared = shared
        self._local = MemoryLedger(clock)
        self._patience = patience or LedgerPatience()
        self._sleep = sleep
        self._random_share = random_share
        self._returns: dict[str, asyncio.Task[None]] = {}
        """By degraded pool: what ends when the shared ledger is back."""
        self._discards: set[asyncio.Task[None]] = set()
        """Releases of what callers reserved and did not wait for."""
        self._owed: dict[str, dict[str, None]] = {}
        """By pool, nonces to release when the shared ledger is back, the oldest first; TTLs end the rest."""

    @property
    def is_degraded(self) -> bool:
        """Whether any pool is reserved by the local view."""
        return bool(self._returns)

    @property
    def degraded_pools(self) -> frozenset[str]:
        """Pools that are reserved by the local view."""
        return frozenset(self._returns)

    @property
    def num_open(self) -> int:
        """Reservations that live, shared (as they were when last asked) and local."""
        return self._shared.num_open + self._local.num_open

    @property
    def num_expired(self) -> int:
        """Reservations that their TTL has ended, as this gateway has seen."""
        return self._shared.num_expired + self._local.num_expired

    @property
    def num_released(self) -> int:
        """Reservations that this gateway has released."""
        return self._shared.num_released + self._local.num_released

    @property
    def num_dropped(self) -> int:
        """Reservations that have ended with their worker, as this gateway has seen."""
        return self._shared.num_dropped + self._local.num_dropped

    async def reserve(
        self, pool: str, candidates: Sequence[Candidate], need: Need, *, nonce: str, ttl_s: float
    ) -> Reservation:
        """Choose the cheapest candidate and reserve on it; see `Ledger.reserve`. Cancelled, it reserves nothing."""
        known = self._local.find(pool, nonce)
        if known is not None:
            return known
        if pool not in self._returns:
            reservation = await self._try_owing(
                pool, nonce, lambda: self._shared.reserve(pool, candidates, need, nonce=nonce, ttl_s=ttl_s)
            )
            if reservation is not None:
                return reservation
        return await self._local.reserve(pool, candidates, need, nonce=nonce, ttl_s=ttl_s)

    async def release(self, pool: str, nonce: str) -> bool:
        """End a reservation on the side where it was made.

        Returns:
            Whether this call ended it; False also when the shared ledger does not answer and will be told later.
        """
        if self._local.find(pool, nonce) is not None:
            return await self._local.release(pool, nonce)
        return bool(await self._try_owing(pool, nonce, lambda: self._shared.release(pool, nonce)))

    async def forget(self, pool: str, worker_id: str, incarnation: str) -> int:
        """End all reservations of a dead worker's life; those that a silent shared ledger has end by TTL."""
        num_local = await self._local.forget(pool, worker_id, incarnation)
        num_shared = await self._try_shared(pool, lambda: self._shared.forget(pool, worker_id, incarnation))
        return num_local + (num_shared or 0)

    async def pending(self, pool: str) -> list[Reservation]:
        """Return the live reservations that are known here."""
        local = await self._local.pending(pool)
        shared = await self._try_shared(pool, lambda: self._shared.pending(pool))
        return local + (shared or [])

    async def close(self) -> None:
        """Release what callers have left behind, stop asking, and close the shared ledger."""
        await asyncio.gather(*self._discards)
        tasks = list(self._returns.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._shared.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _try_owing(self, pool: str, nonce: str, ask: Callable[[], Awaitable[_Answer]]) -> _Answer | None:
        """Ask as `_try_shared` does; when the answer is not heard, what `nonce` may have reserved is released later."""
        try:
            answer = await self._try_shared(pool, ask)
        except asyncio.CancelledError:
            task = asyncio.create_task(self._discard(pool, nonce), name=f"ledger-discard-{pool}")
            self._discards.add(task)
            task.add_done_callback(self._discards.discard)
            raise
        if answer is None:
            self._owe(pool, nonce)
        return answer

    async def _try_shared(self, pool: str, ask: Callable[[], Awaitable[_Answer]]) -> _Answer | None:
        """Return what the shared ledger answers; None when it does not."""
        if pool not in self._returns:
            try:
                async with asyncio.timeout(self._patience.timeout_s):
                    return await ask()
            except _FAILURES as error:
                self._lose(pool, error)
        return None

    async def _discard(self, pool: str, nonce: str) -> None:
        if await self._try_shared(pool, lambda: self._shared.release(pool, nonce)) is None:
            self._owe(pool, nonce)

    def _owe(self, pool: str, nonce: str) -> None:
        owed = self._owed.setdefault(pool, {})
        owed[nonce] = None
        if len(owed) > _MAX_OWED:
            del owed[next(iter(owed))]

    def _lose(self, pool: str, error: Exception) -> None:
        # Of several calls that fail together the first has begun it.
        if pool not in self._returns:
            log.warning("ledger.degraded pool=%s error=%r", pool, error)
            self._returns[pool] = asyncio.create_task(self._return(pool), name=f"ledger-return-{pool}")

    async def _return(self, pool: str) -> None:
        """Ask the shared ledger until it answers and has been told of every release that it missed."""
        wait_s = self._patience.first_wait_s
        while True:
            await self._sleep(wait_s * (1 + self._random_share()) / 2)
            try:
                await self._settle(pool)
            except _FAILURES:
                wait_s = min(2 * wait_s, self._patience.max_wait_s)
            else:
                break
        del self._returns[pool]
        log.info("ledger.restored pool=%s", pool)

    async def _settle(self, pool: str) -> None:
        owed = self._owed.setdefault(pool, {})
        async with asyncio.timeout(self._patience.timeout_s):
            await self._shared.forget(pool, _NOBODY, _NOBODY)
        while owed:
            nonce = next(iter(owed))
            async with asyncio.timeout(self._patience.timeout_s):
                await self._shared.release(pool, nonce)
            owed.pop(nonce, None)
