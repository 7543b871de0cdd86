"""A prefill and a decode worker, a router and real gRPC between them, in one process.

Real engine and model (tiny, random weights), loopback transport, in-memory registry: fast enough for many failures.
"""

import asyncio
import functools
import time
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from cluster.memory_ledger import MemoryLedger
from deployments.config import AppConfig, ModelConfig, PoolConfig, RoutingConfig
from deployments.config_kv import HandoffConfig
from deployments.dispatcher import Dispatcher
from deployments.gateway.gateway import dispatch_rules, make_fleet
from deployments.route import Route
from deployments.router import Router
from deployments.worker.model_host import load_host
from deployments.worker.runtime import WorkerParts, WorkerRuntime, agent_name
from deployments.worker_links import WorkerLinks
from kv_store.registry.memory import MemoryRegistry
from kv_store.transfer.loopback import LoopbackNetwork, LoopbackTransport
from messages.fault_plan import parse_faults
from messages.faults import Faults
from messages.requests import GenerationRequest, RequestId, SamplingParams
from telemetry.metrics import GatewayMetrics, WorkerSample

BLOCK = 8
VOCAB = 97
_MODEL: dict[str, Any] = {
    "dtype": "float32",
    "block_size": BLOCK,
    "prefill_chunk_tokens": 16,
    "max_batch_tokens": 32,
}


def save_tiny_model(folder: Path, **config: Any) -> Path:
    """A model with random weights, the same every time; `config` replaces fields of its LlamaConfig."""
    torch.manual_seed(7)
    fields = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    LlamaForCausalLM(LlamaConfig(**(fields | config))).save_pretrained(folder)
    return folder


def prompt(length: int, seed: int = 0) -> list[int]:
    return [3 + (seed * 53 + position * position * 7 + position) % (VOCAB - 3) for position in range(length)]


@functools.cache
def _reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


async def golden(folder: Path, tokens: list[int], max_tokens: int = 8) -> list[int]:
    """What transformers generates; in a thread, for the workers' leases are renewed on this loop."""

    def generate() -> list[int]:
        with torch.inference_mode():
            out = _reference(folder).generate(torch.tensor([tokens]), do_sample=False, max_new_tokens=max_tokens)
        generated: list[int] = out[0, len(tokens) :].tolist()
        return generated

    return await asyncio.to_thread(generate)


def is_free(sample: WorkerSample) -> bool:
    """Whether a worker holds nothing for anybody."""
    return sample.running == sample.waiting == sample.handoffs == 0 and all(
        group.referenced == 0 and group.free + group.cached == group.total for group in sample.groups
    )


class WorkerPair:
    """Async context manager; `ask` sends a request, the runtimes' desks and the network can be interfered with."""

    def __init__(
        self,
        folder: Path,
        *,
        num_blocks: int = 64,
        lease_s: float = 5.0,
        preempts_each_once: bool = False,
        faults: str = "",
        handoff: dict[str, Any] | None = None,
        **model: Any,
    ) -> None:
        self._preempts_each_once = preempts_each_once
        self._faults = parse_faults(faults)
        self.config = AppConfig(
            version=1,
            models=[
                ModelConfig(
                    name="tiny",
                    source=str(folder),
                    kv_num_blocks=num_blocks,
                    **(_MODEL | model),
                )
            ],
            pools=[
                PoolConfig(name="prefill", role="prefill", num_threads=1),
                PoolConfig(name="decode", role="decode", num_threads=1),
            ],
            # Costs that a test can add up; predicted times depend on how fast the machine is.
            routing=RoutingConfig(policy="cache_aware", prefill_on_decode=False),
            handoff=HandoffConfig(**({"lease_s": lease_s, "read_deadline_s": min(2.0, lease_s / 2)} | (handoff or {}))),
        )
        self.folder = folder
        self.registry = MemoryRegistry()
        self.network = LoopbackNetwork()
        self.workers: dict[str, WorkerRuntime] = {}
        self.agents: dict[str, str] = {}
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for pool in self.config.pools:
            await self._start(pool)
        self.links = WorkerLinks(self.registry)
        watch = asyncio.create_task(self.links.watch())
        self._exits.push_async_callback(_end, watch)
        metrics = GatewayMetrics(self.links)
        fleet = make_fleet(self.config, self.links)
        self.ledger = MemoryLedger()
        dispatcher = Dispatcher(fleet, self.ledger, dispatch_rules(self.config), metrics)
        self._exits.push_async_callback(dispatcher.close)
        self.router = Router(self.links, self.registry, dispatcher, metrics, 256)
        await self.until(self.router.is_ready)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._exits.aclose()

    async def restart(self, name: str) -> None:
        """Let a worker die without a word and start its next life on the same address."""
        port = int(self.workers[name].address.rpartition(":")[2])
        await self.kill(name)
        await self._start(self.config.pool(name), port)

    async def kill(self, name: str) -> None:
        """End a worker as SIGKILL does: its memory and its sockets are gone, nobody is told."""
        worker = self.workers.pop(name)
        self.network.kill(self.agents.pop(name))
        for task in worker._tasks:
            task.cancel()
        await worker._server.stop(None)
        worker._engine.close()

    async def _start(self, pool: PoolConfig, port: int = 0) -> None:
        name = agent_name(pool.name)
        faults = Faults(self._faults, pool=pool.name)
        model = await asyncio.to_thread(load_host, self.config, pool, self.folder, faults)
        limits = replace(model.limits, preempts_each_once=self._preempts_each_once)
        parts = WorkerParts(
            model=replace(model, limits=limits),
            transport=LoopbackTransport(name, model.arena.buffer, self.network),
            registry=self.registry,
            grammars=model.make_grammars(),
            faults=faults,
        )
        runtime = WorkerRuntime(self.config, pool, pool.name, "127.0.0.1", parts, port)
        self.agents[pool.name] = name
        self.workers[pool.name] = await self._exits.enter_async_context(runtime)

    def request(self, prompt: list[int], max_tokens: int = 8, name: str = "r", **sampling: Any) -> GenerationRequest:
        defaults = {"max_tokens": max_tokens, "temperature": 0.0, "end_token_ids": (2,), "seed": 1}
        return GenerationRequest(
            request_id=RequestId(name),
            model="tiny",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(**(defaults | sampling)),
        )

    async def route(self, prompt: list[int], max_tokens: int = 8, name: str = "r", **sampling: Any) -> Route:
        return await self.router.route(self.request(prompt, max_tokens, name, **sampling))

    async def ask(
        self, prompt: list[int], max_tokens: int = 8, name: str = "r", **sampling: Any
    ) -> tuple[list[int], Route]:
        route = await self.route(prompt, max_tokens, name, **sampling)
        tokens: list[int] = []
        async with aclosing(route.tokens()) as events:
            async for event in events:
                tokens.extend(event.token_ids)
        return tokens, route

    def sample(self, worker_id: str) -> WorkerSample:
        return next(sample for sample in self.links.samples() if sample.worker_id == worker_id)

    def is_at_baseline(self) -> bool:
        samples = self.links.samples()
        return len(samples) == len(self.config.pools) and all(map(is_free, samples))

    async def until(self, condition: Any, timeout_s: float = 5.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, [str(sample) for sample in self.links.samples()]
            await asyncio.sleep(0.02)

    async def until_baseline(self, timeout_s: float = 2.0) -> None:
        # A heartbeat from before the end may still be on its way.
        await asyncio.sleep(0.3)
        await self.until(self.is_at_baseline, timeout_s)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
