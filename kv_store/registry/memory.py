"""A registry inside one process: what one machine without Redis and the tests use."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from kv_store.registry.key_names import life_of
from kv_store.registry.prefix_scan import PrefixScan
from kv_store.registry.protocol import Claimant, PrefixHits, ShardMemory, Tier, WorkerRecord
from kv_store.registry.worker_table import lives
from messages.errors import RegistryError
from messages.handoff import BlockKey

SHARD = "memory"
"""The name of the only shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Life:
    record: WorkerRecord
    expires_at_s: float
    replaced: frozenset[str]
    """Incarnations that this life has replaced; they may not come back while it lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holding:
    incarnation: str
    generation: int
    tier: Tier

    @property
    def life(self) -> str:
        return life_of(self.incarnation, self.generation)


class MemoryRegistry:
    """Shared by every worker and router of one process; keeps the promises of `Registry` on an injected clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.is_silent = False
        """Set it, and nothing is answered or taken in, as when every shard is dead; what is there stays."""
        self.forget()

    @property
    def num_silent(self) -> int:
        """1 while it is silent."""
        return int(self.is_silent)

    def forget(self) -> None:
        """Lose everything, as a server that restarts does."""
        self._epoch = secrets.token_hex(8)
        self._lives: dict[str, _Life] = {}
        self._holders: dict[BlockKey, dict[str, _Holding]] = {}
        self._sequences: dict[tuple[str, str], int] = {}

    async def register(self, record: WorkerRecord, *, lease_s: float) -> dict[str, ShardMemory]:
        """Make the worker visible for `lease_s` from now; see `Registry.register`."""
        self._refuse_when_silent()
        old = self._live().get(record.worker_id)
        is_new = old is None or old.record.incarnation != record.incarnation
        replaced: frozenset[str] = frozenset()
        if old is not None:
            replaced = old.replaced
            if record.incarnation in replaced:
                raise RegistryError("another life of this worker has taken over", worker_id=record.worker_id)
            if is_new:
                replaced |= {old.record.incarnation}
                self._purge(record.worker_id, old.record.incarnation)
            elif record.generation < old.record.generation:
                record = old.record
        self._lives[record.worker_id] = _Life(record=record, expires_at_s=self._clock() + lease_s, replaced=replaced)
        sequence = self._sequences.get((record.worker_id, record.incarnation), 0)
        return {SHARD: ShardMemory(epoch=self._epoch, sequence=sequence, is_new=is_new)}

    async def unregister(self, worker_id: str, incarnation: str) -> None:
        """Take this life of the worker away; any other life stays."""
        life = self._lives.get(worker_id)
        if not self.is_silent and life is not None and life.record.incarnation == incarnation:
            del self._lives[worker_id]
            self._purge(worker_id, incarnation)

    async def workers(self) -> list[WorkerRecord]:
        """Return the workers whose lease runs, by id."""
        self._refuse_when_silent()
        return [life.record for _, life in sorted(self._live().items())]

    async def shards(self) -> tuple[str, ...]:
        """Return the name of the only shard."""
        return (SHARD,)

    async def spread(self, keys: Sequence[BlockKey]) -> dict[str, list[BlockKey]]:
        """Return all keys for the only shard."""
        return {SHARD: list(keys)} if keys else {}

    async def write(
        self, shard: str, claimant: Claimant, changes: Mapping[BlockKey, Tier | None], sequence: int
    ) -> ShardMemory | None:
        """Say what became of blocks; see `Registry.write`."""
        if shard != SHARD or self.is_silent:
            return None
        for key, tier in changes.items():
            if tier is None:
                self._drop(key, claimant.worker_id, claimant.incarnation)
            else:
                self._claim(key, claimant, tier)
        writer = (claimant.worker_id, claimant.incarnation)
        before = self._sequences.get(writer, 0)
        self._sequences[writer] = sequence
        return ShardMemory(epoch=self._epoch, sequence=before)

    async def publish(
        self,
        worker_id: str,
        incarnation: str,
        keys: Sequence[BlockKey],
        *,
        tier: Tier = "device",
        generation: int = 0,
    ) -> None:
        """Say that the worker holds these complete blocks."""
        claimant = Claimant(worker_id=worker_id, incarnation=incarnation, generation=generation)
        for key in () if self.is_silent else keys:
            self._claim(key, claimant, tier)

    async def withdraw(self, worker_id: str, incarnation: str, keys: Sequence[BlockKey]) -> None:
        """Say that the worker holds these blocks no longer; absent ones are skipped."""
        for key in () if self.is_silent else keys:
            self._drop(key, worker_id, incarnation)

    async def lookup(self, keys: Sequence[BlockKey]) -> PrefixHits:
        """Find who holds the longest prefix of `keys`; nothing is known while it is silent."""
        if self.is_silent:
            return PrefixHits(unknown=bool(keys))
        scan = PrefixScan(lives(life.record for life in self._live().values()))
        scan.advance(
            {worker_id: holding.life for worker_id, holding in self._holders.get(key, {}).items()} for key in keys
        )
        return scan.hits()

    async def tend(self) -> None:
        """Drop the claims of lives that have ended, all at once: it is only a walk through this process's memory."""
        live = lives(life.record for life in self._live().values())
        for key, holders in list(self._holders.items()):
            kept = {worker_id: held for worker_id, held in holders.items() if live.get(worker_id) == held.life}
            if kept:
                self._holders[key] = kept
            else:
                del self._holders[key]

    async def close(self) -> None:
        """Keep everything: others in the process may still use it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _refuse_when_silent(self) -> None:
        if self.is_silent:
            raise RegistryError("no shard of the registry answers", num_silent=1)

    def _live(self) -> dict[str, _Life]:
        now_s = self._clock()
        return {worker_id: life for worker_id, life in self._lives.items() if life.expires_at_s > now_s}

    def _claim(self, key: BlockKey, claimant: Claimant, tier: Tier) -> None:
        holding = _Holding(incarnation=claimant.incarnation, generation=claimant.generation, tier=tier)
        self._holders.setdefault(key, {})[claimant.worker_id] = holding

    def _purge(self, worker_id: str, incarnation: str) -> None:
        self._sequences.pop((worker_id, incarnation), None)
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
