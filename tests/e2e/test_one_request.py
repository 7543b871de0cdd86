"""Greedy output of the disaggregated system == of one unified worker == of transformers, token for token."""

import asyncio
from pathlib import Path

import pytest

from deployments.local_stack import LocalStack
from kvferry import AsyncClient
from kvferry.results import Completion
from tests.e2e.reference import Reference
from tests.e2e.system import Metrics, wait_for_baseline

pytestmark = [pytest.mark.ray, pytest.mark.redis, pytest.mark.nixl, pytest.mark.timeout(1500)]

MAX_TOKENS = 48
COUNTS = [8, pytest.param(40, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def reference(demo_folder: Path) -> Reference:
    return Reference(demo_folder)


@pytest.fixture(scope="module")
def golden(reference: Reference) -> dict[tuple[int, ...], list[int]]:
    return {}


def expected(reference: Reference, golden: dict[tuple[int, ...], list[int]], prompt: list[int]) -> list[int]:
    key = tuple(prompt)
    if key not in golden:
        golden[key] = reference.generate(prompt, MAX_TOKENS)
    return golden[key]


async def ask(stack: LocalStack, prompts: list[list[int]], concurrency: int) -> list[Completion]:
    gate = asyncio.Semaphore(concurrency)
    async with AsyncClient(stack.grpc_address, timeout_s=600) as client:

        async def one(prompt: list[int]) -> Completion:
            async with gate:
                return await client.generate(prompt, max_tokens=MAX_TOKENS, temperature=0)

        return await asyncio.gather(*(one(prompt) for prompt in prompts))


def check(reference: Reference, golden: dict, prompts: list[list[int]], answers: list[Completion]) -> None:
    wrong = [
        len(prompt)
        for prompt, answer in zip(prompts, answers, strict=True)
        if not reference.is_same(prompt, expected(reference, golden, prompt), list(answer.token_ids))
    ]
    assert wrong == [], f"prompts of these lengths differ: {wrong}"


@pytest.mark.parametrize("count", COUNTS)
async def test_disaggregated_output_equals_transformers(
    count: int, disaggregated: LocalStack, reference: Reference, golden: dict
) -> None:
    prompts = reference.prompts(count)
    alone = await ask(disaggregated, prompts, 1)
    together = await ask(disaggregated, prompts, 8)

    check(reference, golden, prompts, alone)
    check(reference, golden, prompts, together)

    # Every prompt of more than a block went through a prefill worker, and decode computed at most one block of it.
    for prompt, answer in zip(prompts, alone, strict=True):
        is_remote = len(prompt) > 32
        assert bool(answer.provenance.prefill_worker) == is_remote
        assert answer.provenance.decode_computed_tokens <= 32
        assert answer.provenance.blocks_moved == (-(-len(prompt) // 32) if is_remote else 0)
    wait_for_baseline(disaggregated, 2.0)
    metrics = Metrics(disaggregated.http_url)
    served = 2 * len(prompts)
    assert metrics.total("kvferry_prompt_tokens_computed_total", role="decode") <= 32 * served
    assert metrics.total("kvferry_transfer_failures_total") == 0


async def test_a_repeated_prompt_is_reused_and_says_so(disaggregated: LocalStack, reference: Reference) -> None:
    prompt = [*reference.prompts(12)[-1][:300], 7]
    first, second = [(await ask(disaggregated, [prompt], 1))[0] for _ in range(2)]

    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens == len(prompt) // 32 * 32
    assert second.token_ids == first.token_ids
    assert second.provenance.prefill_worker == ""


async def test_sampling_is_the_same_alone_and_among_others(disaggregated: LocalStack, reference: Reference) -> None:
    prompts = reference.prompts(10)[:10]
    async with AsyncClient(disaggregated.grpc_address, timeout_s=600) as client:

        async def one(prompt: list[int]) -> tuple[int, ...]:
            done = await client.generate(prompt[-200:], max_tokens=16, temperature=0.8, top_p=0.9, top_k=50, seed=11)
            return done.token_ids

        alone = [await one(prompt) for prompt in prompts]
        together = await asyncio.gather(*(one(prompt) for prompt in prompts))

    assert sum(a == b for a, b in zip(alone, together, strict=True)) >= len(prompts) - 1


@pytest.mark.parametrize("count", COUNTS)
async def test_unified_output_equals_transformers(
    count: int, unified: LocalStack, reference: Reference, golden: dict
) -> None:
    prompts = reference.prompts(count)

    check(reference, golden, prompts, await ask(unified, prompts, 1))
    check(reference, golden, prompts, await ask(unified, prompts, 8))

    wait_for_baseline(unified, 2.0)
