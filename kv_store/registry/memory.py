"""A registry inside one process: what one machine without Redis and the tests use."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from kv_store.registry.prefix_scan import PrefixScan
from kv_store.registry.protocol import PrefixHits, Tier, WorkerRecord
from messages.errors import RegistryError
from messages.handoff import BlockKey


@dataclass(frozen=True, slots=True, kw_only=True)
class _Life:
    record: WorkerRecord
    expires_at_s: float
    replaced: frozenset[str]
    """Incarnations that this life has replaced; they may not come back while it lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holding:
    incarnation: str
    tier: Tier


class MemoryRegistry:
    """Shared by every worker and router of one process; keeps the promises of `Registry` on an injected clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lives: dict[str, _Life] = {}
        self._holders: dict[BlockKey, dict[str, _Holding]] = {}

    async def register(self, record: WorkerRecord, *, lease_s: float) -> None:
        """Make the worker visible for `lease_s` from now; see `Registry.register`."""
        old = self._live().get(record.worker_id)
        replaced: frozenset[str] = frozenset()
        if old is not None:
            replaced = old.replaced
            if record.incarnation in replaced:
                raise RegistryError("another life of this worker has taken over", worker_id=record.worker_id)
            if record.incarnation != old.record.incarnation:
                replaced |= {old.record.incarnation}
                self._purge(record.worker_id, old.record.incarnation)
        self._lives[record.worker_id] = _Life(record=record, expires_at_s=self._clock() + lease_s, replaced=replaced)

    async def unregister(self, worker_id: str, incarnation: str) -> None:
        """Take this life of the worker away; any other life stays."""
        life = self._lives.get(worker_id)
        if life is not None and life.record.incarnation == incarnation:
            del self._lives[worker_id]
            self._purge(worker_id, incarnation)

    async def workers(self) -> list[WorkerRecord]:
        """Return the workers whose lease runs, by id."""
        return [life.record for _, life in sorted(self._live().items())]

    async def publish(
        self, worker_id: str, incarnation: str, keys: Sequence[BlockKey], *, tier: Tier = "device"
    ) -> None:
        """Say that the worker holds these complete blocks."""
        holding = _Holding(incarnation=incarnation, tier=tier)
        for key in keys:
            self._holders.setdefault(key, {})[worker_id] = holding

    async def withdraw(self, worker_id: str, incarnation: str, keys: Sequence[BlockKey]) -> None:
        """Say that the worker holds these blocks no longer; absent ones are skipped."""
        for key in keys:
            self._drop(key, worker_id, incarnation)

    async def lookup(self, keys: Sequence[BlockKey]) -> PrefixHits:
        """Find who holds the longest prefix of `keys`; nothing is ever unknown here."""
        scan = PrefixScan({worker_id: life.record.incarnation for worker_id, life in self._live().items()})
        scan.advance(
            {worker_id: holding.incarnation for worker_id, holding in self._holders.get(key, {}).items()}
            for key in keys
        )
        return scan.hits()

    async def close(self) -> None:
        """Keep everything: others in the process may still use it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _live(self) -> dict[str, _Life]:
        now_s = self._clock()
        return {worker_id: life for worker_id, life in self._lives.items() if life.expires_at_s > now_s}

    def _purge(self, worker_id: str, incarnation: str) -> None:
        for key in list(self._holders):
            self._drop(key, worker_id, incarnation)

    def _drop(self, key: BlockKey, worker_id: str, incarnation: str) -> None:
        holders = self._holders.get(key, {})
        holding = holders.get(worker_id)
        if holding is None or holding.incarnation != incarnation:
            return
        del holders[worker_id]
        if not holders:
            del self._holders[key]
