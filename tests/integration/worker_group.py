"""Workers of any roles, each a pool of its own, so that a test can say which one runs a request and who may lend."""

from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from cluster.pools import Role
from deployments.config import PoolConfig, RoutingConfig
from deployments.config_kv import ReuseConfig
from deployments.worker_links import Exchange
from messages.errors import ServingError
from messages.reuse import PrefixSource, ReuseOffer
from messages.v1 import worker_pb2 as pb
from messages.wire import error_from_wire, request_to_wire, reuse_to_wire, tokens_from_wire
from tests.integration.worker_pair import WorkerPair

COSTS_IN_TOKENS = RoutingConfig(policy="cache_aware")
EAGER = {"min_tokens": 1, "overhead_ms": 0.0, "margin": 0.0}
"""Prefixes move whenever somebody holds more."""


@dataclass(slots=True)
class Answer:
    """What one worker gave for one request."""

    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    cached_tokens: int = 0
    done: pb.WorkDone = field(default_factory=pb.WorkDone)
    num_logprobs: int = 0
    """Entries for the prompt's tokens."""


class WorkerGroup(WorkerPair):
    """Async context manager; `run_on` sends a request straight to one worker, with a hint of the test's choice."""

    def __init__(self, folder: Path, roles: dict[str, Role], *, reuse: dict[str, Any] | None = None, **more: Any):
        super().__init__(folder, **more)
        pools = [PoolConfig(name=name, role=role, num_threads=1) for name, role in roles.items()]
        # Costs in tokens, which a test can add up; predicted times depend on how fast the machine is.
        update = {"pools": pools, "reuse": ReuseConfig(**(EAGER | (reuse or {}))), "routing": COSTS_IN_TOKENS}
        self.config = self.config.model_copy(update=update)

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        await self.until(lambda: len(self.links.live()) == len(self.config.pools))
        return self

    def source(self, worker_id: str, num_blocks: int) -> PrefixSource:
        worker = self.workers[worker_id].describe()
        return PrefixSource(
            worker_id=worker_id,
            incarnation=worker["incarnation"],
            address=worker["address"],
            num_blocks=num_blocks,
        )

    async def run_on(
        self, worker_id: str, prompt: list[int], *sources: PrefixSource, name: str = "r", **sampling: Any
    ) -> Answer:
        async with self.submitted(worker_id, prompt, *sources, name=name, **sampling) as exchange:
            return await self.answer(exchange)

    @asynccontextmanager
    async def submitted(
        self, worker_id: str, prompt: list[int], *sources: PrefixSource, name: str = "r", **sampling: Any
    ) -> AsyncIterator[Exchange]:
        """A request that runs; leaving aborts it."""
        request = self.request(prompt, name=name, **sampling)
        submit = pb.SubmitUnified(request=request_to_wire(request), reuse=reuse_to_wire(ReuseOffer(sources=sources)))
        exchange = self.router.exchange(request.request_id)
        exchange.join("decode", self.router.link(worker_id))
        exchange.send("decode", pb.GatewayMessage(submit_unified=submit))
        try:
            yield exchange
        finally:
            exchange.abandon("over")

    async def answer(self, exchange: Exchange) -> Answer:
        answer = Answer()
        while True:
            event = (await exchange.next()).event
            if isinstance(event, ServingError):
                raise event
            match event.WhichOneof("body"):
                case "failed":
                    exchange.finish("decode")
                    raise error_from_wire(event.failed.error, event.failed.message)
                case "accepted":
                    answer.cached_tokens = event.accepted.cached_tokens
                case "work_done":
                    answer.done = event.work_done
                case "tokens":
                    tokens = tokens_from_wire(event.tokens)
                    answer.tokens[tokens.choice].extend(tokens.token_ids)
                    answer.num_logprobs += len(tokens.prompt_logprobs)
                    if answer.done.request_id:
                        exchange.finish("decode")
                        return replace(answer, tokens=dict(answer.tokens))

    def counter(self, worker_id: str, name: str) -> float:
        return self.sample(worker_id).counters.get(name, 0.0)


async def warm(group: WorkerGroup, worker_id: str, tokens: list[int]) -> None:
    """Let a worker hold the full blocks of a prompt."""
    await group.run_on(worker_id, tokens, name=f"warm-{worker_id}-{len(tokens)}-{tokens[0]}", max_tokens=1)
