"""The Gateway deployment: owns the listeners, follows the workers, and answers requests through the router."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

from cluster.reuse import ReuseRules
from cluster.routing import RoutingRules
from deployments.config import AppConfig, faults, parse_config
from deployments.config_kv import ReuseConfig
from deployments.gateway.listeners import Listeners
from deployments.gateway.text_service import TextService
from deployments.registry_client import hooks_into, make_registry, tend
from deployments.router import Router
from deployments.worker_links import WorkerLinks
from engine.tokenizer import Tokenizer
from kv_store.registry_faults import with_faults
from messages.errors import ServingError
from telemetry.metrics import GatewayMetrics, RegistryMetrics

_SILENT_LEASES = 2
"""A worker that has said nothing for so many leases is lost, whatever its sockets look like."""


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
        router = Router(links, registry, routing_rules(config), metrics, config.limits.max_buffered_events)
        self.service = TextService(config.model.name, tokenizer, router, metrics, config.limits)
        self._watch = asyncio.create_task(links.watch(), name="worker-links")
        self._tend = asyncio.create_task(tend(registry), name="registry-tend")
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
        self._watch.cancel()
        self._tend.cancel()
        await asyncio.gather(self._watch, self._tend, return_exceptions=True)

    def check(self) -> None:
        """Say whether this gateway is fit to go on.

        Raises:
            ServingError: A task of it has stopped.
        """
        if self._watch.done():
            raise ServingError("the gateway has stopped following the workers")
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


def routing_rules(config: AppConfig) -> RoutingRules:
    """The configured side of routing decisions."""
    return RoutingRules(
        pools=config.pool_specs(),
        local_prefill_max_tokens=config.local_prefill_max_tokens,
        long_prefill_tokens=config.routing.long_prefill_tokens,
        reuse=_reuse_rules(config.reuse) if config.reuse.enabled else None,
    )


def _reuse_rules(settings: ReuseConfig) -> ReuseRules:
    return ReuseRules(
        min_tokens=settings.min_tokens,
        assumed_prefill_tokens_s=settings.assumed_prefill_tokens_s,
        assumed_transfer_bytes_s=settings.assumed_transfer_gb_s * 1e9,
        overhead_s=settings.overhead_ms / 1e3,
        margin=settings.margin,
    )
