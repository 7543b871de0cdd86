"""Hand-offs that other systems have lost, between real engines (CASES.md, A)."""

import asyncio
import time
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from messages.errors import DeadlineExceeded, ServingError
from messages.requests import GenerationRequest, RequestId, SamplingParams
from tests.integration.worker_pair import VOCAB, WorkerPair, save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [3 + (seed * 53 + position * position * 7 + position) % (VOCAB - 3) for position in range(length)]


async def golden(model: LlamaForCausalLM, tokens: list[int], max_tokens: int) -> list[int]:
    """What transformers gives; in a thread, for the workers' leases are renewed on this loop."""

    def generate() -> list[int]:
        with torch.inference_mode():
            out = model.generate(torch.tensor([tokens]), do_sample=False, max_new_tokens=max_tokens)
        return out[0, len(tokens) :].tolist()

    return await asyncio.to_thread(generate)


async def leave_after(pair: WorkerPair, seconds: float) -> None:
    """Ask, and give up after so long without having got a token."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(pair.ask(prompt(60), max_tokens=12, name="left"), seconds)


async def test_a_client_that_leaves_a_silent_prefill_frees_the_decode_worker(
    folder: Path, model: LlamaForCausalLM
) -> None:
    """Case 1: prefill accepts, then says nothing more; decode waits for KV that never comes."""
    async with WorkerPair(folder, lease_s=1.0, faults="worker.event:drop*30+1@prefill") as pair:
        await leave_after(pair, 1.0)

        await pair.until_baseline(timeout_s=2.0)


async def test_bytes_that_come_after_the_lease_reach_no_other_request(folder: Path, model: LlamaForCausalLM) -> None:
    """Case 8: the first transfer hangs, its lease of 50 ms ends, and the few blocks go to others meanwhile."""
    limits = {"lease_s": 0.05, "read_deadline_s": 0.04, "digest": True}
    async with WorkerPair(folder, num_blocks=24, handoff=limits) as pair:
        pair.network.stop(pair.agents["prefill"])
        asking = [
            asyncio.create_task(pair.ask(prompt(60, seed=seed), max_tokens=12, name=f"r{seed}")) for seed in (0, 1)
        ]
        await asyncio.sleep(1.2)
        pair.network.resume(pair.agents["prefill"])

        answers = await asyncio.gather(*asking)

        assert [tokens for tokens, _ in answers] == [await golden(model, prompt(60, seed=seed), 12) for seed in (0, 1)]
        await pair.until_baseline()


async def test_a_burst_over_the_capacity_ends_and_nothing_is_left(folder: Path, model: LlamaForCausalLM) -> None:
    """Case 9: 64 requests at once, room for 8."""
    async with WorkerPair(folder, num_blocks=40, max_running=8) as pair:
        started_s = time.monotonic()

        answers = await asyncio.gather(
            *(pair.ask(prompt(30, seed=seed), max_tokens=4, name=f"r{seed}") for seed in range(64)),
            return_exceptions=True,
        )

        assert time.monotonic() - started_s < 30
        for seed, answer in enumerate(answers):
            if isinstance(answer, BaseException):
                assert isinstance(answer, ServingError)
                assert answer.retryable
            else:
                assert answer[0] == await golden(model, prompt(30, seed=seed), 4)
        await pair.until_baseline()


async def test_a_connection_that_was_idle_serves_its_next_request(
    folder: Path, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 10: idle for three times the keep-alive of the channel between the workers."""
    idle = ("grpc.client_idle_timeout_ms", 500)
    monkeypatch.setattr("deployments.worker.peers.CHANNEL_OPTIONS", (idle,))
    async with WorkerPair(folder) as pair:
        await pair.ask(prompt(60), max_tokens=4, name="first")
        await asyncio.sleep(1.5)

        tokens, route = await pair.ask(prompt(60, seed=1), max_tokens=12, name="second")

        assert tokens == await golden(model, prompt(60, seed=1), 12)
        assert route.provenance.blocks_moved == 8


async def test_a_prefill_that_fails_is_heard_of_soon_and_frees_the_decode_worker(
    folder: Path, model: LlamaForCausalLM
) -> None:
    """Case 11."""
    async with WorkerPair(folder, faults="engine.prefill_chunk:error*1+1@prefill") as pair:
        started_s = time.monotonic()
        try:
            tokens, _ = await pair.ask(prompt(60), max_tokens=12)
        except ServingError:
            tokens = await golden(model, prompt(60), 12)

        assert time.monotonic() - started_s < 5
        assert tokens == await golden(model, prompt(60), 12)
        await pair.until_baseline()
        again, _ = await pair.ask(prompt(60), max_tokens=12, name="again")
        assert again == await golden(model, prompt(60), 12)


async def test_a_slow_prefill_does_not_use_up_the_time_of_the_read(folder: Path, model: LlamaForCausalLM) -> None:
    """Case 12: the deadline of a read begins when its blocks exist, and heartbeats keep the lease meanwhile."""
    limits = {"lease_s": 2.0, "read_deadline_s": 1.0}
    async with WorkerPair(folder, faults="engine.prefill_chunk:delay=3*1@prefill", handoff=limits) as pair:
        tokens, route = await pair.ask(prompt(60), max_tokens=12)

        assert tokens == await golden(model, prompt(60), 12)
        assert route.provenance.blocks_moved == 8
        await pair.until_baseline()
        assert pair.sample("prefill").counters["lease_expired_total"] == 0
        assert pair.sample("prefill").counters["lease_extended_total"] >= 4


async def test_leaving_between_the_end_of_prefill_and_the_start_of_decode_frees_prefill_at_once(folder: Path) -> None:
    """Case 13 and window W3: an explicit release, the lease of 30 s is only the backstop."""
    async with WorkerPair(folder, lease_s=30.0, faults="worker.message:delay=0.6@decode") as pair:
        route = await pair.route(prompt(60), max_tokens=12)
        async with aclosing(route.tokens()) as events:
            await anext(events)
        await pair.until(lambda: pair.sample("prefill").handoffs == 0, timeout_s=1.0)

        await pair.until_baseline(timeout_s=5.0)
        assert pair.sample("prefill").counters["lease_expired_total"] == 0


async def test_an_owner_silent_in_the_middle_of_a_read_costs_a_recompute_in_other_blocks(
    folder: Path, model: LlamaForCausalLM
) -> None:
    """Rule 1: the destinations may still be written to, so they stay taken until the owner goes on."""
    limits = {"lease_s": 6.0, "read_deadline_s": 0.8}
    async with WorkerPair(folder, handoff=limits, faults="transfer.read:delay=0.5*1@decode") as pair:
        asking = asyncio.create_task(pair.ask(prompt(60), max_tokens=12, name="r"))
        await asyncio.sleep(0.4)
        pair.network.stop(pair.agents["prefill"])

        tokens, route = await asyncio.wait_for(asking, 10)

        assert tokens == await golden(model, prompt(60), 12)
        assert route.provenance.decode_computed_tokens == 60
        await pair.until(lambda: pair.sample("decode").running == 0)
        assert pair.sample("decode").groups[0].referenced == 8
        pair.network.resume(pair.agents["prefill"])
        await pair.until_baseline()


async def test_a_request_that_waits_for_a_silent_owner_does_not_hold_up_others(
    folder: Path, model: LlamaForCausalLM
) -> None:
    limits = {"lease_s": 8.0, "read_deadline_s": 0.8}
    faults = "transfer.read:delay=0.5*1@decode"
    async with WorkerPair(folder, num_blocks=12, handoff=limits, faults=faults) as pair:
        asking = asyncio.create_task(pair.ask(prompt(60), max_tokens=12, name="large"))
        await asyncio.sleep(0.4)
        pair.network.stop(pair.agents["prefill"])
        await pair.until(lambda: pair.sample("decode").waiting == 1 and pair.sample("decode").running == 0)
        await asyncio.sleep(3.5)

        tokens, _ = await asyncio.wait_for(pair.ask(prompt(5, seed=1), max_tokens=4, name="small"), 5)

        assert tokens == await golden(model, prompt(5, seed=1), 4)
        assert not asking.done()
        pair.network.resume(pair.agents["prefill"])
        assert (await asyncio.wait_for(asking, 10))[0] == await golden(model, prompt(60), 12)
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
async def test_a_chunk_may_be_smaller_than_a_block(folder: Path, model: LlamaForCausalLM, chunk_tokens: int) -> None:
    async with WorkerPair(folder, prefill_chunk_tokens=chunk_tokens, max_batch_tokens=chunk_tokens) as pair:
        tokens, _ = await asyncio.wait_for(pair.ask(prompt(50), max_tokens=12), 20)

        assert tokens == await golden(model, prompt(50), 12)
        await pair.until_baseline()
