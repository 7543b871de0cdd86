"""Hand-offs that other systems have lost, between real engines (CASES.md, A); blocks of 16 tokens."""

import asyncio
import time
from contextlib import aclosing
from pathlib import Path

import pytest

from deployments.gateway.status_codes import http_status
from messages.errors import DeadlineExceeded, ServingError
from messages.requests import GenerationRequest, RequestId, SamplingParams
from tests.integration.worker_pair import WorkerPair, golden, is_free, prompt, save_tiny_model

BLOCK = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


async def test_a_client_that_leaves_a_silent_prefill_frees_the_decode_worker(folder: Path) -> None:
    """Case 1: prefill accepts, then says nothing more; decode waits for KV that never comes, and is left after 1 s."""
    silence = "worker.event:drop*30+1@prefill"
    async with WorkerPair(folder, lease_s=1.0, block_size=BLOCK, faults=silence) as pair:
        asking = asyncio.create_task(pair.ask(prompt(60), max_tokens=12))
        await asyncio.sleep(1.0)
        held = pair.sample("decode").groups[0].referenced

        asking.cancel()
        await asyncio.wait([asking])

        await pair.until(pair.is_at_baseline, timeout_s=2.0)
    assert held == 4


async def test_bytes_that_come_after_the_lease_reach_no_other_request(folder: Path) -> None:
    """Case 8: a transfer hangs for 2 s, leases of 50 ms end, and 24 blocks are not enough for both requests."""
    limits = {"lease_s": 0.05, "read_deadline_s": 0.04, "digest": True}
    prompts = [prompt(200, seed=seed) for seed in (0, 1)]
    async with WorkerPair(folder, num_blocks=24, block_size=BLOCK, handoff=limits) as pair:
        pair.network.stop(pair.agents["prefill"])
        asking = [
            asyncio.create_task(pair.ask(tokens, max_tokens=12, name=f"r{number}"))
            for number, tokens in enumerate(prompts)
        ]
        await asyncio.sleep(2.0)
        pair.network.resume(pair.agents["prefill"])

        answers = await asyncio.gather(*asking)

        assert [tokens for tokens, _ in answers] == [await golden(folder, tokens, 12) for tokens in prompts]
        await pair.until_baseline()
        assert pair.sample("prefill").counters["lease_expired_total"] >= 1


async def test_a_burst_over_the_capacity_ends_and_nothing_is_left(folder: Path) -> None:
    """Case 9: 64 requests at once, room for 8: each is answered (200) or refused (503) within 30 s."""
    async with WorkerPair(folder, num_blocks=24, block_size=BLOCK, max_running=8) as pair:
        started_s = time.monotonic()

        answers = await asyncio.gather(
            *(pair.ask(prompt(30, seed=seed), max_tokens=4, name=f"r{seed}") for seed in range(64)),
            return_exceptions=True,
        )

        assert time.monotonic() - started_s < 30
        for seed, answer in enumerate(answers):
            if isinstance(answer, BaseException):
                assert isinstance(answer, ServingError)
                assert http_status(answer) == 503
            else:
                assert answer[0] == await golden(folder, prompt(30, seed=seed), 4)
        await pair.until_baseline()


@pytest.mark.parametrize("keep_alive_s", [0.5, pytest.param(5.0, marks=pytest.mark.slow)])
async def test_a_connection_that_was_idle_serves_its_next_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch, keep_alive_s: float
) -> None:
    """Case 10: idle for three times the keep-alive of the channel between the workers, 15 s with full counts."""
    idle = ("grpc.client_idle_timeout_ms", int(keep_alive_s * 1000))
    monkeypatch.setattr("deployments.worker.peers.CHANNEL_OPTIONS", (idle,))
    async with WorkerPair(folder, block_size=BLOCK) as pair:
        await pair.ask(prompt(60), max_tokens=4, name="first")
        await asyncio.sleep(3 * keep_alive_s)

        tokens, route = await pair.ask(prompt(60, seed=1), max_tokens=12, name="second")

        assert tokens == await golden(folder, prompt(60, seed=1), 12)
        assert route.provenance.blocks_moved == 4


async def test_a_prefill_that_fails_is_heard_of_soon_and_frees_the_decode_worker(folder: Path) -> None:
    """Case 11: the model raises in the second chunk; there is no other prefill worker to go to."""
    async with WorkerPair(folder, block_size=BLOCK, faults="engine.prefill_chunk:error*1+1@prefill") as pair:
        started_s = time.monotonic()

        with pytest.raises(ServingError) as caught:
            await pair.ask(prompt(60), max_tokens=12)

        assert time.monotonic() - started_s < 5
        assert http_status(caught.value) == 500
        await pair.until_baseline()
        again, _ = await pair.ask(prompt(60), max_tokens=12, name="again")
        assert again == await golden(folder, prompt(60), 12)


async def test_a_slow_prefill_does_not_use_up_the_time_of_the_read(folder: Path) -> None:
    """Case 12: the deadline of a read begins when its blocks exist, and heartbeats keep the lease meanwhile."""
    limits = {"lease_s": 2.5, "read_deadline_s": 2.0}
    sleep = "engine.prefill_chunk:delay=3*1@prefill"
    async with WorkerPair(folder, block_size=BLOCK, faults=sleep, handoff=limits) as pair:
        tokens, route = await pair.ask(prompt(60), max_tokens=12)

        assert tokens == await golden(folder, prompt(60), 12)
        assert route.provenance.blocks_moved == 4
        await pair.until_baseline()
        assert pair.sample("prefill").counters["lease_expired_total"] == 0
        assert pair.sample("prefill").counters["lease_extended_total"] >= 4


async def test_leaving_between_the_end_of_prefill_and_the_start_of_decode_frees_prefill_at_once(folder: Path) -> None:
    """Case 13, rule 3 and window W3: an explicit release, the lease of 30 s is only the backstop."""
    barrier = "worker.message:delay=1.2*1@decode"
    async with WorkerPair(folder, lease_s=30.0, block_size=BLOCK, faults=barrier) as pair:
        route = await pair.route(prompt(60), max_tokens=12)
        async with aclosing(route.tokens()) as events:
            await anext(events)
            await pair.until(lambda: pair.sample("prefill").handoffs == 1)
            is_decode_free = is_free(pair.sample("decode"))
        await pair.until(lambda: is_free(pair.sample("prefill")), timeout_s=1.0)

        await pair.until_baseline(timeout_s=5.0)
        assert is_decode_free
        assert pair.sample("prefill").counters["lease_expired_total"] == 0


async def test_an_owner_silent_in_the_middle_of_a_read_costs_a_recompute_in_other_blocks(folder: Path) -> None:
    """Rule 1: the destinations may still be written to, so they stay taken until the owner goes on."""
    limits = {"lease_s": 6.0, "read_deadline_s": 0.8}
    async with WorkerPair(folder, handoff=limits, faults="transfer.read:delay=0.5*1@decode") as pair:
        asking = asyncio.create_task(pair.ask(prompt(60), max_tokens=12, name="r"))
        await asyncio.sleep(0.4)
        pair.network.stop(pair.agents["prefill"])

        tokens, route = await asyncio.wait_for(asking, 10)

        assert tokens == await golden(folder, prompt(60), 12)
        assert route.provenance.decode_computed_tokens == 60
        await pair.until(lambda: pair.sample("decode").running == 0)
        assert pair.sample("decode").groups[0].referenced == 8
        pair.network.resume(pair.agents["prefill"])
        await pair.until_baseline()


async def test_a_request_that_waits_for_a_silent_owner_does_not_hold_up_others(folder: Path) -> None:
    limits = {"lease_s": 8.0, "read_deadline_s": 0.8}
    faults = "transfer.read:delay=0.5*1@decode"
    async with WorkerPair(folder, num_blocks=12, handoff=limits, faults=faults) as pair:
        asking = asyncio.create_task(pair.ask(prompt(60), max_tokens=12, name="large"))
        await asyncio.sleep(0.4)
        pair.network.stop(pair.agents["prefill"])
        await pair.until(lambda: pair.sample("decode").waiting == 1 and pair.sample("decode").running == 0)
        await asyncio.sleep(3.5)

        tokens, _ = await asyncio.wait_for(pair.ask(prompt(5, seed=1), max_tokens=4, name="small"), 5)

        assert tokens == await golden(folder, prompt(5, seed=1), 4)
        assert not asking.done()
        pair.network.resume(pair.agents["prefill"])
        assert (await asyncio.wait_for(asking, 10))[0] == await golden(folder, prompt(60), 12)
        await pair.until_baseline()


async def test_a_worker_ends_a_request_whose_gateway_does_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.worker.desk.GATEWAY_MARGIN_S", 0.0)
    async with WorkerPair(folder, faults="engine.prefill_chunk:delay=0.3@prefill") as pair:
        sampling = SamplingParams(max_tokens=4, temperature=0.0)
        request = GenerationRequest(
            request_id=RequestId("late"),
            model="tiny",
            prompt_token_ids=tuple(prompt(200)),
            sampling=sampling,
            timeout_s=0.5,
        )

        with pytest.raises(DeadlineExceeded):
            async with aclosing((await pair.router.route(request)).tokens()) as events:
                [event async for event in events]

        await pair.until_baseline()


@pytest.mark.parametrize("chunk_tokens", [3, 7])
async def test_a_chunk_may_be_smaller_than_a_block(folder: Path, chunk_tokens: int) -> None:
    async with WorkerPair(folder, prefill_chunk_tokens=chunk_tokens, max_batch_tokens=chunk_tokens) as pair:
        tokens, _ = await asyncio.wait_for(pair.ask(prompt(50), max_tokens=12), 20)

        assert tokens == await golden(folder, prompt(50), 12)
        await pair.until_baseline()
