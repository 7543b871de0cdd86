"""The Gateway deployment: owns the listeners, follows the workers, and answers requests through the router."""

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

from cluster.degrading_ledger import DegradingLedger
from cluster.ledger_faults import with_faults as with_ledger_faults
from cluster.placement import PlacementRules
from cluster.policies import PolicyRules
from cluster.pool_board import SpillRules
from cluster.pools import prefill_boundaries
from cluster.reuse import ReuseRules
from cluster.thresholds import AdaptiveThresholds, ThresholdRules
from deployments.config import AppConfig, faults, parse_config
from deployments.config_kv import ReuseConfig
from deployments.dispatcher import Dispatcher, DispatchRules
from deployments.fleet import Fleet
from deployments.gateway.listeners import Listeners
from deployments.gateway.text_service import TextService
from deployments.moving_ranges import MovingRanges
from deployments.registry_client import hooks_into, make_ledger, make_registry, tend
from deployments.router import Router
from deployments.worker_links import WorkerLinks
from engine.tokenizer import Tokenizer
from kv_store.registry_faults import with_faults
from messages.errors import ServingError
from telemetry.metrics import GatewayMetrics, LedgerCollector, RegistryMetrics

_SILENT_LEASES = 2
"""A worker that has said nothing for so many leases is lost, whatever its sockets look like."""


_LINE_PERIOD_S = 0.5


class GatewayRuntime:
    """One gateway, whole, without Serve; an async context manager."""

    def __init__(self, config: AppConfig) -> None:
        self._config = config
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as exits:
            await self._open(exits)
            self._exits = exits.pop_all()
        return self

    async def _open(self, exits: AsyncExitStack) -> None:
        config = self._config
        tokenizer = await asyncio.to_thread(Tokenizer.load, Path(config.model.source))
        seen = RegistryMetrics()
        redis = await exits.enter_async_context(make_registry(config.registry, hooks_into(seen)))
        seen.degraded.set_function(lambda: float(redis.num_silent > 0))
        registry = with_faults(redis, faults())
        self.links = links = WorkerLinks(
            registry, _SILENT_LEASES * config.registry.lease_s, grace_s=config.registry.lease_s
        )
        metrics = GatewayMetrics(links)
        seen.register(metrics.registry)
        shared = with_ledger_faults(make_ledger(config.registry), faults())
        ledger = await exits.enter_async_context(DegradingLedger(shared))
        metrics.registry.register(LedgerCollector(ledger))
        fleet = make_fleet(config, links)
        dispatcher = Dispatcher(fleet, ledger, dispatch_rules(config), metrics, _moving_ranges(config, fleet))
        exits.push_async_callback(dispatcher.close)
        router = Router(links, registry, dispatcher, metrics, config.limits.max_buffered_events)
        max_wait_s = config.routing.long_max_wait_s
        self.service = TextService(config.model.name, tokenizer, router, metrics, config.limits, max_wait_s=max_wait_s)
        self._watch = asyncio.create_task(links.watch(), name="worker-links")
        self._tend = asyncio.create_task(tend(registry), name="registry-tend")
        self._admit = asyncio.create_task(self._tend_line(), name="waiting-line")
        exits.push_async_callback(self._stop_watching)
        gateway = config.gateway
        self.listeners = await exits.enter_async_context(
            Listeners(
                self.service, gateway.host, gateway.grpc_port, gateway.http_port, metrics.registry, gateway.drain_s
            )
        )

    async def __aexit__(self, *exc_info: object) -> None:
        self.service.is_draining = True
        await self._exits.aclose()

    async def _stop_watching(self) -> None:
        tasks = (self._watch, self._tend, self._admit)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _tend_line(self) -> None:
        while True:
            self.service.tend()
            await asyncio.sleep(_LINE_PERIOD_S)

    def check(self) -> None:
        """Say whether this gateway is fit to go on.

        Raises:
            ServingError: A task of it has stopped.
        """
        if self._watch.done():
            raise ServingError("the gateway has stopped following the workers")
        if self._admit.done():
            raise ServingError("the gateway has stopped admitting requests")
        if self._tend.done():
            raise ServingError("the gateway has stopped tending the registry")


class Gateway:
    """One replica of the gateway; Serve owns its life."""

    async def __init__(self, config: dict[str, Any], *pools: object) -> None:  # type: ignore[misc]  # Serve awaits it
        # Handles of the pools come in so that Serve deploys them; the data path does not use them.
        self._pools = pools
        self._runtime = GatewayRuntime(parse_config(config))
        await self._runtime.__aenter__()

    def check_health(self) -> None:
        """Called by Serve; raising restarts the replica."""
        self._runtime.check()

    async def __del__(self) -> None:
        await self._runtime.__aexit__(None, None, None)


def make_fleet(config: AppConfig, links: WorkerLinks) -> Fleet:
    """The workers of the configured pools."""
    routing = config.routing
    spill = SpillRules(enter=routing.spill_enter, leave=routing.spill_leave, long_max_wait_s=routing.long_max_wait_s)
    return Fleet(links, config.pool_specs(), spill, _reuse_rules(config.reuse))


def _moving_ranges(config: AppConfig, fleet: Fleet) -> MovingRanges | None:
    boundaries = prefill_boundaries(config.pool_specs())
    if config.routing.thresholds == "fixed" or boundaries is None:
        return None
    return MovingRanges(fleet.board, AdaptiveThresholds(boundaries, ThresholdRules(), time.monotonic))


def dispatch_rules(config: AppConfig) -> DispatchRules:
    """The configured side of where requests go."""
    return DispatchRules(
        placement=PlacementRules(
            policy=config.routing.policy,
            costs=PolicyRules(block_size=config.model.block_size),
            local_prefill_max_tokens=config.local_prefill_max_tokens,
            prefills_on_decode=config.routing.prefill_on_decode,
            reuse=_reuse_rules(config.reuse) if config.reuse.enabled else None,
        ),
        long_prefill_tokens=config.routing.long_prefill_tokens,
    )


def _reuse_rules(settings: ReuseConfig) -> ReuseRules:
    return ReuseRules(
        min_tokens=settings.min_tokens,
        assumed_prefill_tokens_s=settings.assumed_prefill_tokens_s,
        assumed_transfer_bytes_s=settings.assumed_transfer_gb_s * 1e9,
        overhead_s=settings.overhead_ms / 1e3,
        margin=settings.margin,
    )
