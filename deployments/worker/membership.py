"""Keeps the registry's picture of one worker true: its lease, and which blocks it holds."""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from deployments.registry_client import tend
from kv_store.local_cache import CacheChanges
from kv_store.registry.protocol import Claimant, Registry, WorkerRecord
from kv_store.registry.publisher import BlockPublisher, PublisherCounts, PublishLimits
from messages.errors import RegistryError

log = logging.getLogger(__name__)

PUBLISH_PERIOD_S = 0.05
"""Changes of so long are sent together."""
RETRY_S = 0.5
"""A generation whose registration failed is registered again so much later, or when the next renewal is due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipTimes:
    """How long what is said of a worker holds."""

    lease_s: float
    """The worker is gone when it does not renew for so long."""
    entry_ttl_s: float = 4 * 3600.0
    """What is said of a block is forgotten after so long; it is said again in half of it."""


class Membership:
    """Registers, renews at a third of the lease, and says which blocks the worker holds for as long as it does."""

    def __init__(
        self,
        registry: Registry,
        record: WorkerRecord,
        times: MembershipTimes,
        *,
        limits: PublishLimits | None = None,
        jitter: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """Say nothing yet.

        Args:
            registry: Where to say it.
            record: The worker, at generation 0.
            times: Lease and time to live.
            limits: Bounds on what waits and goes out.
            jitter: A random number between two.
        """
        self._registry = registry
        self._record = record
        self._times = times
        self._jitter = jitter
        claimant = Claimant(worker_id=record.worker_id, incarnation=record.incarnation)
        self._publisher = BlockPublisher(registry, claimant, limits)
        self._has_work = asyncio.Event()
        self._must_register = asyncio.Event()
        self._is_listed = asyncio.Event()
        """Whether the present generation is."""
        self._registering = asyncio.Lock()
        self._has_left = False

    @property
    def counts(self) -> PublisherCounts:
        """What went wrong on the way and was made good."""
        return self._publisher.counts

    @property
    def queue_depth(self) -> int:
        """Statements about blocks that wait to be sent."""
        return self._publisher.queue_depth

    @property
    def generation(self) -> int:
        """How often all claims were taken away at once."""
        return self._publisher.claimant.generation

    def note(self, changes: CacheChanges) -> None:
        """Blocks that became, or ceased to be, full and reusable."""
        if not changes.stored and not changes.removed:
            return
        if self._publisher.note(changes.stored, changes.removed):
            self._is_listed.clear()
            self._must_register.set()
        self._has_work.set()

    async def renew(self) -> None:
        """Keep the lease until cancelled or `leave`, and find out what shards have forgotten."""
        # Workers that start together must not renew together.
        share = self._jitter(0.2, 1.0)
        while True:
            async with self._registering:
                if self._has_left:
                    return
                await self._register()
            self._publisher.refresh(self._times.entry_ttl_s)
            # Also when nothing changed here: shards may have come or gone.
            self._has_work.set()
            period_s = self._times.lease_s / 3
            await self._wait_until_due(share * (period_s if self._is_listed.is_set() else min(period_s, RETRY_S)))
            share = self._jitter(0.8, 1.0)

    async def publish(self) -> None:
        """Send what is to be said until cancelled."""
        while True:
            await self._until_work()
            await asyncio.sleep(PUBLISH_PERIOD_S)
            # Claims of a life or generation that is not listed are taken for a dead one's.
            await self._is_listed.wait()
            self._has_work.clear()
            pause_s = await self._publisher.flush()
            await asyncio.sleep(max(0.0, pause_s - PUBLISH_PERIOD_S))

    async def tend(self) -> None:
        """Take part in cleaning the registry up until cancelled."""
        await tend(self._registry)

    async def leave(self) -> None:
        """Take the worker out of the table, for good."""
        # A renewal that is under way would bring it back.
        async with self._registering:
            self._has_left = True
            try:
                await self._registry.unregister(self._record.worker_id, self._record.incarnation)
            except RegistryError as error:
                log.warning("registry.unreachable error=%s", error)

    async def _register(self) -> None:
        self._must_register.clear()
        expected = self._publisher.expect()
        record = replace(self._record, generation=self.generation)
        try:
            memories = await self._registry.register(record, lease_s=self._times.lease_s)
        except RegistryError as error:
            log.warning("registry.unreachable error=%s", error)
        else:
            self._publisher.check(memories, expected, self._times.lease_s)
            if record.generation == self.generation:
                self._is_listed.set()

    async def _until_work(self) -> None:
        try:
            async with asyncio.timeout(self._publisher.wait_s):
                await self._has_work.wait()
        except TimeoutError:
            return

    async def _wait_until_due(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._must_register.wait()
        except TimeoutError:
            return
