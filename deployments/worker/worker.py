"""The Worker deployment: Serve owns its life, the runtime does the work."""

import asyncio
import os
import threading
from typing import Any

from ray import serve
from ray.util import get_node_ip_address

from deployments.config import faults, parse_config
from deployments.worker.parts import make_parts
from deployments.worker.runtime import WorkerRuntime
from telemetry.logs import log_to_stderr

EXIT_DELAY_S = 0.3


class Worker:
    """One replica: one engine on one device."""

    async def __init__(self, config: dict[str, Any], pool_name: str) -> None:  # type: ignore[misc]  # Serve awaits it
        log_to_stderr()
        settings = parse_config(config)
        pool = settings.pool(pool_name)
        worker_id = f"{pool_name}-{serve.get_replica_context().replica_id.unique_id}"
        parts = await asyncio.to_thread(make_parts, settings, pool, worker_id, faults(pool.name))
        self._drain_s = settings.gateway.drain_s
        self._runtime = WorkerRuntime(settings, pool, worker_id, pool.host or get_node_ip_address(), parts)
        await self._runtime.__aenter__()

    def check_health(self) -> None:
        """Called by Serve; raising restarts the replica."""
        self._runtime.check()

    def describe(self) -> dict[str, str]:
        """Who and where this worker is."""
        return self._runtime.describe()

    async def __del__(self) -> None:
        await self._runtime.drain(self._drain_s)
        await self._runtime.__aexit__(None, None, None)
        # A process that made a NIXL agent crashes in its exit handlers; leave without them, once Serve has the answer.
        threading.Timer(EXIT_DELAY_S, os._exit, (0,)).start()
