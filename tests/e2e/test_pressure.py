"""Greedy requests at concurrency 16 through the whole system, preempted over and over, equal to one at a time."""

import asyncio
import random

import pytest

from deployments.local_stack import LocalStack
from kvferry import AsyncClient
from tests.e2e.reference import Reference
from tests.e2e.system import Metrics, wait_for_baseline

pytestmark = [pytest.mark.ray, pytest.mark.redis, pytest.mark.nixl, pytest.mark.timeout(2400)]

CONCURRENCY = 16
COUNTS = [16, pytest.param(200, marks=pytest.mark.slow)]
VOCABULARY = range(1000, 40_000)
Request = tuple[list[int], int]
GOLDEN: dict[int, list[list[int]]] = {}
"""By count of requests: their tokens, one request at a time."""


def make_requests(count: int) -> list[Request]:
    draw = random.Random(count)  # noqa: S311 - prompts, not secrets
    return [([draw.choice(VOCABULARY) for _ in range(draw.randint(1, 60))], draw.randint(16, 64)) for _ in range(count)]


async def ask(stack: LocalStack, requests: list[Request], concurrency: int) -> list[list[int]]:
    gate = asyncio.Semaphore(concurrency)
    async with AsyncClient(stack.grpc_address, timeout_s=600) as client:

        async def one(prompt: list[int], max_tokens: int) -> list[int]:
            async with gate:
                return list((await client.generate(prompt, max_tokens=max_tokens, temperature=0)).token_ids)

        return await asyncio.gather(*(one(*request) for request in requests))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", ["small_arena", "preempting"])
async def test_many_at_once_equal_one_at_a_time(count: int, kind: str, request: pytest.FixtureRequest) -> None:
    stack: LocalStack = request.getfixturevalue(kind)
    reference = Reference(stack.config.model.source)
    requests = make_requests(count)
    before = Metrics(stack.http_url).total("kvferry_preemptions_total")
    together = await ask(stack, requests, CONCURRENCY)
    preemptions = Metrics(stack.http_url).total("kvferry_preemptions_total") - before

    if count not in GOLDEN:
        GOLDEN[count] = await ask(stack, requests, 1)
    alone = GOLDEN[count]

    wrong = [
        number
        for number, ((prompt, _), want, have) in enumerate(zip(requests, alone, together, strict=True))
        if not reference.is_same(prompt, want, have)
    ]
    print(f"{count} requests, {preemptions:.0f} preemptions")
    assert wrong == []
    assert preemptions >= (count / 2 if kind == "small_arena" else count * 0.8)
    wait_for_baseline(stack, 2.0)
