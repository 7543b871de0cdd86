"""Keeps the registry's picture of one worker true: its lease, and which blocks it holds."""

import asyncio
import logging
import random

from kv_store.local_cache import CacheChanges
from kv_store.registry.protocol import Registry, WorkerRecord
from messages.errors import RegistryError
from messages.handoff import BlockKey

log = logging.getLogger(__name__)

PUBLISH_PERIOD_S = 0.05
"""Changes of so long are sent together."""


class Membership:
    """Registers, renews at a third of the lease, publishes and withdraws blocks in the order they changed."""

    def __init__(self, registry: Registry, record: WorkerRecord, lease_s: float) -> None:
        self._registry = registry
        self._record = record
        self._lease_s = lease_s
        self._pending: dict[BlockKey, bool] = {}
        """Newest state per key: True is stored, False is removed."""
        self._changed = asyncio.Event()

    def note(self, changes: CacheChanges) -> None:
        """Blocks that became, or ceased to be, full and reusable."""
        if not changes.stored and not changes.removed:
            return
        self._pending.update(dict.fromkeys(changes.stored, True))
        self._pending.update(dict.fromkeys(changes.removed, False))
        self._changed.set()

    async def renew(self) -> None:
        """Keep the lease until cancelled."""
        while True:
            try:
                await self._registry.register(self._record, lease_s=self._lease_s)
            except RegistryError as error:
                log.warning("registry.unreachable error=%s", error)
            await asyncio.sleep(self._lease_s / 3 * random.uniform(0.8, 1.0))  # noqa: S311 - jitter

    async def publish(self) -> None:
        """Send changes until cancelled."""
        while True:
            await self._changed.wait()
            await asyncio.sleep(PUBLISH_PERIOD_S)
            self._changed.clear()
            pending, self._pending = self._pending, {}
            stored = [key for key, is_stored in pending.items() if is_stored]
            removed = [key for key, is_stored in pending.items() if not is_stored]
            record = self._record
            if removed:
                await self._registry.withdraw(record.worker_id, record.incarnation, removed)
            if stored:
                await self._registry.publish(record.worker_id, record.incarnation, stored)

    async def leave(self) -> None:
        """Take the worker out of the table."""
        try:
            await self._registry.unregister(self._record.worker_id, self._record.incarnation)
        except RegistryError as error:
            log.warning("registry.unreachable error=%s", error)
