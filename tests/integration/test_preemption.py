"""Many greedy requests at once in a small arena: preempted over and over, every output as if it had been alone."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from deployments.config import AppConfig, ModelConfig, PoolConfig
from deployments.worker.model_host import ModelHost, load_host
from engine.events import Failed, StepOutput
from engine.request import Part
from messages.requests import GenerationRequest, RequestId, SamplingParams
from messages.tokens import TokenEvent
from tests.integration.worker_pair import VOCAB, WorkerPair, save_tiny_model

CONCURRENCY = 16
TIE = 1e-4
COUNTS = [40, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def make_requests(count: int) -> list[GenerationRequest]:
    draw = random.Random(count)  # noqa: S311 - prompts, not secrets
    return [
        GenerationRequest(
            request_id=RequestId(f"r{number}"),
            model="tiny",
            prompt_token_ids=tuple(draw.randrange(3, VOCAB) for _ in range(draw.randint(1, 90))),
            sampling=SamplingParams(max_tokens=draw.randint(1, 60), temperature=0.0, end_token_ids=(2,)),
        )
        for number in range(count)
    ]


class OneEngine:
    """An engine loop that is driven from asyncio."""

    def __init__(self, host: ModelHost) -> None:
        self._loop = asyncio.get_running_loop()
        self._ends: dict[RequestId, asyncio.Future[list[int]]] = {}
        self._tokens: dict[RequestId, list[int]] = {}
        self.last: StepOutput | None = None
        self.engine = host.make_engine(lambda output: self._loop.call_soon_threadsafe(self._take, output))
        self.engine.start()

    def _take(self, output: StepOutput) -> None:
        self.last = output
        for event in output.events:
            if isinstance(event, Failed):
                self._ends[event.request_id].set_exception(event.error)
            elif isinstance(event, TokenEvent):
                assert event.first_index == len(self._tokens[event.request_id])
                self._tokens[event.request_id].extend(event.token_ids)
                if event.finish_reason is not None:
                    self._ends[event.request_id].set_result(self._tokens[event.request_id])

    async def run(self, requests: list[GenerationRequest], concurrency: int) -> list[list[int]]:
        gate = asyncio.Semaphore(concurrency)

        async def one(request: GenerationRequest) -> list[int]:
            async with gate:
                self._tokens[request.request_id] = []
                self._ends[request.request_id] = self._loop.create_future()
                self.engine.submit(request, Part.WHOLE)
                return await self._ends[request.request_id]

        return await asyncio.gather(*(one(request) for request in requests))

    async def close(self) -> None:
        await asyncio.to_thread(self.engine.close)


def make_host(folder: Path, num_blocks: int, *, preempts_each_once: bool = False) -> ModelHost:
    config = AppConfig(
        version=1,
        models=[
            ModelConfig(
                name="tiny",
                source=str(folder),
                dtype="float32",
                block_size=8,
                kv_num_blocks=num_blocks,
                max_batch_tokens=64,
                prefill_chunk_tokens=32,
            )
        ],
        pools=[PoolConfig(name="unified", role="unified", num_threads=1)],
    )
    host = load_host(config, config.pools[0], folder)
    return replace(host, limits=replace(host.limits, preempts_each_once=preempts_each_once))


async def alone(folder: Path, requests: list[GenerationRequest]) -> list[list[int]]:
    engine = OneEngine(await asyncio.to_thread(make_host, folder, 200))
    outputs = await engine.run(requests, 1)
    await engine.close()
    return outputs


def assert_same(
    folder: Path, requests: list[GenerationRequest], expected: list[list[int]], got: list[list[int]]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for request, want, have in zip(requests, expected, got, strict=True):
        if want == have:
            continue
        at = next(i for i, (a, b) in enumerate(zip(want, have, strict=False)) if a != b)
        with torch.inference_mode():
            logits = model(torch.tensor([[*request.prompt_token_ids, *want[:at]]])).logits[0, -1]
        best = logits.topk(2).values
        print(f"{request.request_id}: first difference at {at}, top logits {best[0] - best[1]:.2e} apart")
        assert best[0] - best[1] < TIE


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("preempts_each_once", [False, True])
async def test_requests_that_are_preempted_get_the_same_tokens(
    folder: Path, count: int, preempts_each_once: bool
) -> None:
    requests = make_requests(count)
    expected = await alone(folder, requests)
    host = await asyncio.to_thread(make_host, folder, 34, preempts_each_once=preempts_each_once)
    engine = OneEngine(host)

    got = await engine.run(requests, CONCURRENCY)
    await engine.close()

    assert_same(folder, requests, expected, got)
    assert engine.last is not None
    preemptions = engine.last.load.counters["preemptions_total"]
    print(f"{count} requests, {preemptions:.0f} preemptions")
    assert preemptions >= count / 2
    assert all(group.referenced == 0 for group in engine.last.load.groups)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("preempts_each_once", [False, True])
async def test_the_same_through_prefill_and_decode_workers(folder: Path, count: int, preempts_each_once: bool) -> None:
    requests = make_requests(count)
    expected = await alone(folder, requests)
    gate = asyncio.Semaphore(CONCURRENCY)
    async with WorkerPair(folder, num_blocks=34, preempts_each_once=preempts_each_once) as pair:

        async def one(request: GenerationRequest) -> list[int]:
            async with gate:
                sampling = request.sampling
                prompt = list(request.prompt_token_ids)
                return (await pair.ask(prompt, max_tokens=sampling.max_tokens, name=request.request_id))[0]

        got = await asyncio.gather(*(one(request) for request in requests))
        await pair.until_baseline()
        preemptions = pair.sample("decode").counters["preemptions_total"]

    assert_same(folder, requests, expected, got)
    print(f"{count} requests, {preemptions:.0f} preemptions on the decode worker")
    assert preemptions >= count / 4
