"""Both doors on real sockets, in front of a scripted service."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc
import httpx
import openai
import pytest
from prometheus_client import CollectorRegistry

from deployments.gateway.listeners import Listeners
from deployments.gateway.scripted_service import Script, ScriptedService
from kvferry.v1 import inference_pb2_grpc

HELLO = Script(pieces=["Hel", "lo ", "\u2028w", "orld"])


class Doors:
    def __init__(self, service: ScriptedService, listeners: Listeners, registry: CollectorRegistry) -> None:
        self.service = service
        self.listeners = listeners
        self.registry = registry
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{listeners.http_port}", timeout=10)
        self.openai = openai.AsyncOpenAI(api_key="none", base_url=f"{self.http.base_url}/v1", max_retries=0, timeout=10)
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{listeners.grpc_port}")
        self.grpc: Any = inference_pb2_grpc.InferenceStub(self.channel)

    async def until_running(self, num_requests: int) -> None:
        async with asyncio.timeout(2):
            while self.service.num_running != num_requests:  # noqa: ASYNC110 - the service has no event for it
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        await self.http.aclose()
        await self.openai.close()
        await self.channel.close()


@asynccontextmanager
async def _open_doors(script: Script = HELLO, *, is_ready: bool = True, drain_s: float = 5.0) -> AsyncIterator[Doors]:
    service, registry = ScriptedService(script, is_ready=is_ready), CollectorRegistry()
    async with Listeners(service, "127.0.0.1", 0, 0, registry, drain_s) as listeners:
        doors = Doors(service, listeners, registry)
        try:
            yield doors
        finally:
            await doors.close()
    assert service.num_running == 0


@pytest.fixture
def open_doors() -> Callable[..., AbstractAsyncContextManager[Doors]]:
    """Opens both doors on free ports; afterwards, no request is left running."""
    return _open_doors
