"""The Gateway deployment: owns the listeners, follows the workers, and answers requests through the router."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

from cluster.pools import PoolSpec
from cluster.routing import RoutingRules
from deployments.config import AppConfig, parse_config
from deployments.gateway.listeners import Listeners
from deployments.gateway.text_service import TextService
from deployments.router import Router
from deployments.worker_links import WorkerLinks
from engine.tokenizer import Tokenizer
from kv_store.registry.redis import RedisRegistry
from messages.errors import ServingError
from telemetry.metrics import GatewayMetrics


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
        registry = await exits.enter_async_context(RedisRegistry(config.registry.urls, config.registry.namespace))
        links = WorkerLinks(registry)
        metrics = GatewayMetrics(links)
        router = Router(links, registry, routing_rules(config), metrics, config.limits.max_buffered_events)
        self.service = TextService(config.model.name, tokenizer, router, metrics, config.limits)
        self._watch = asyncio.create_task(links.watch(), name="worker-links")
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
        await asyncio.gather(self._watch, return_exceptions=True)

    def check(self) -> None:
        """Say whether this gateway is fit to go on.

        Raises:
            ServingError: It follows the workers no longer.
        """
        if self._watch.done():
            raise ServingError("the gateway has stopped following the workers")


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
    pools = []
    for pool in config.pools:
        least, most = config.prefill_range(pool.name)
        pools.append(PoolSpec(name=pool.name, role=pool.role, min_prefill_tokens=least, max_prefill_tokens=most))
    return RoutingRules(
        pools=tuple(pools),
        local_prefill_max_tokens=config.local_prefill_max_tokens,
        long_prefill_tokens=config.routing.long_prefill_tokens,
    )
