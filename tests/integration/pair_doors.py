"""The doors of a gateway in front of a worker pair: real sockets, the SDK and an HTTP client, all in one process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from deployments.config import LimitsConfig
from deployments.gateway.listeners import Listeners
from deployments.gateway.text_service import TextService
from engine.tokenizer import Tokenizer
from kvferry import AsyncClient
from telemetry.metrics import GatewayMetrics
from tests.integration.process_group import words_of
from tests.integration.worker_pair import WorkerPair


@dataclass(frozen=True, kw_only=True)
class Doors:
    """Both ways in."""

    http: httpx.AsyncClient
    client: AsyncClient
    tokenizer: Tokenizer

    async def chat(
        self, tokens: list[int], *, headers: dict[str, str] | None = None, **fields: object
    ) -> httpx.Response:
        """Ask over HTTP, greedily, for what follows exactly these tokens."""
        messages = [{"role": "user", "content": words_of(tokens)}]
        body = {"messages": messages, "temperature": 0, "ignore_eos": True, **fields}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)

    def text(self, tokens: list[int]) -> str:
        """What an answer of these tokens says."""
        return self.tokenizer.decode(tokens)


@asynccontextmanager
async def open_doors(pair: WorkerPair) -> AsyncIterator[Doors]:
    """Open both on free ports; the folder of the pair's model must have a tokenizer."""
    tokenizer = Tokenizer.load(pair.folder)
    metrics = GatewayMetrics(pair.links)
    service = TextService("tiny", tokenizer, pair.router, metrics, LimitsConfig())
    # A client that gives no connection up by itself.
    limits: dict[str, Any] = {"limits": httpx.Limits(max_connections=None, keepalive_expiry=None), "timeout": 30.0}
    async with (
        Listeners(service, "127.0.0.1", 0, 0, metrics.registry, 1.0) as listeners,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{listeners.http_port}", **limits) as http,
        AsyncClient(f"127.0.0.1:{listeners.grpc_port}", timeout_s=30) as client,
    ):
        yield Doors(http=http, client=client, tokenizer=tokenizer)
