"""Requests through a router, two workers and a hand-off, against transformers, and what happens when parts fail."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from messages.errors import ServingError
from messages.requests import GenerationRequest, Grammar, GrammarKind, RequestId, SamplingParams
from tests.integration.worker_pair import BLOCK, WorkerPair, golden, prompt, save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def pair(folder: Path) -> AsyncIterator[WorkerPair]:
    async with WorkerPair(folder) as pair:
        yield pair


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 33, 100])
async def test_disaggregated_output_equals_transformers(pair: WorkerPair, folder: Path, length: int) -> None:
    """Rule 15: a block, which decode may compute itself, is not handed off; one token more is, as a whole."""
    tokens, route = await pair.ask(prompt(length), max_tokens=12)

    assert tokens == await golden(folder, prompt(length), 12)
    assert bool(route.provenance.prefill_worker) == (length > BLOCK)
    assert route.provenance.decode_computed_tokens <= BLOCK
    await pair.until_baseline()


async def test_many_at_once_get_the_same_tokens_as_alone(folder: Path) -> None:
    prompts = [prompt(5 + 9 * number, seed=number) for number in range(12)]
    async with WorkerPair(folder, num_blocks=40) as pair:
        answers = await asyncio.gather(
            *(pair.ask(tokens, max_tokens=20, name=f"r{number}") for number, tokens in enumerate(prompts))
        )

        assert [tokens for tokens, _ in answers] == [await golden(folder, tokens, 20) for tokens in prompts]
        await pair.until_baseline()


async def test_a_repeated_prompt_is_not_sent_to_prefill_again(pair: WorkerPair) -> None:
    first, _ = await pair.ask(prompt(50), name="first")
    # The registry hears of new blocks a moment later.
    await asyncio.sleep(0.2)

    second, route = await pair.ask(prompt(50), name="second")

    assert second == first
    assert route.cached_tokens == 48
    assert route.provenance.prefill_worker == ""
    assert route.provenance.decode_computed_tokens == 2


async def test_a_wrong_registry_costs_a_remote_prefill_and_nothing_else(pair: WorkerPair) -> None:
    tokens = prompt(50)
    expected, _ = await pair.ask(tokens, name="first")
    await asyncio.sleep(0.2)
    others = [prompt(60, seed=seed) for seed in range(1, 12)]
    for number, other in enumerate(others):
        await pair.ask(other, name=f"o{number}")
    route = await pair.route(tokens, name="again")
    route._hits["decode"] = 48

    got = []
    async with aclosing(route.tokens()) as events:
        async for event in events:
            got.extend(event.token_ids)

    assert got == expected
    await pair.until_baseline()


async def test_one_token_needs_no_decode_worker(pair: WorkerPair) -> None:
    """Rule 3: decode was told that it is not needed, and prefill did not wait for its lease of 5 s."""
    tokens, route = await pair.ask(prompt(30), max_tokens=1)

    assert len(tokens) == 1
    assert route.provenance.blocks_moved == 0
    await pair.until_baseline()
    assert pair.sample("prefill").counters["lease_expired_total"] == 0


@pytest.mark.parametrize("after", [0, 1, 3])
async def test_leaving_the_stream_gives_everything_back(pair: WorkerPair, after: int) -> None:
    route = await pair.route(prompt(100), max_tokens=300)
    stream = route.tokens()
    for _ in range(after):
        await anext(stream)
    if after == 0:
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    await stream.aclose()

    await pair.until_baseline()


async def test_a_transfer_that_fails_costs_a_recompute_and_no_wrong_token(pair: WorkerPair, folder: Path) -> None:
    pair.network.kill(pair.agents["prefill"])

    tokens, route = await pair.ask(prompt(60), max_tokens=12)

    assert tokens == await golden(folder, prompt(60), 12)
    assert route.provenance.decode_computed_tokens == 60
    assert pair.sample("decode").counters["transfer_failures_total"] <= 1
    await pair.until_baseline()


async def test_a_lease_that_ends_before_close_costs_a_recompute(folder: Path) -> None:
    async with WorkerPair(folder, lease_s=0.2) as pair:
        pair.network.stop(pair.agents["prefill"])
        asking = asyncio.create_task(pair.ask(prompt(60), max_tokens=12))
        await asyncio.sleep(1.0)
        pair.network.resume(pair.agents["prefill"])

        tokens, _ = await asking

        assert tokens == await golden(folder, prompt(60), 12)
        await pair.until_baseline()


async def test_a_request_that_can_never_run_is_refused_and_leaves_nothing(pair: WorkerPair) -> None:
    with pytest.raises(ServingError, match=r"context length|KV blocks"):
        await pair.ask(prompt(500), max_tokens=100)

    await pair.until_baseline()


async def test_a_message_that_a_worker_cannot_read_ends_its_own_request_alone(pair: WorkerPair, folder: Path) -> None:
    other = asyncio.create_task(pair.ask(prompt(60), max_tokens=40, name="other"))
    unknown = cast("GrammarKind", SimpleNamespace(value="a kind of next year"))
    sampling = SamplingParams(max_tokens=4, grammar=Grammar(kind=unknown, source="x"))
    for length in (5, 50):
        request = GenerationRequest(
            request_id=RequestId(f"bad-{length}"),
            model="tiny",
            prompt_token_ids=tuple(prompt(length, seed=length)),
            sampling=sampling,
        )
        with pytest.raises(ServingError, match="failed to carry a message out"):
            async with aclosing((await pair.router.route(request)).tokens()) as events:
                [event async for event in events]

    assert (await other)[0] == await golden(folder, prompt(60), 40)
    await pair.until_baseline()
