"""What every GenerationService promises the doors; a new one adds its factory to FACTORIES."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import cast

import pytest

from deployments.gateway.scripted_service import Script, ScriptedService
from deployments.service import ChatTurn, Chunk, GenerationService, GenerationSpec, Prompt
from messages.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, ServingError
from messages.tokens import FinishReason

Factory = Callable[[], AbstractAsyncContextManager[GenerationService]]


@asynccontextmanager
async def scripted() -> AsyncIterator[GenerationService]:
    service = ScriptedService(Script(pieces=[" once", " upon", " a", " time", " there", " was"] * 20, delay_s=0.001))
    yield service
    assert service.num_running == 0


FACTORIES: list[Factory] = [scripted]


@pytest.fixture(params=FACTORIES, ids=lambda factory: factory.__name__)
async def service(request: pytest.FixtureRequest) -> AsyncIterator[GenerationService]:
    async with request.param() as made:
        yield made


def start(service: GenerationService, spec: GenerationSpec) -> AsyncGenerator[Chunk, None]:
    return cast("AsyncGenerator[Chunk, None]", service.generate(spec))


async def run(service: GenerationService, spec: GenerationSpec) -> list[Chunk]:
    return [chunk async for chunk in service.generate(spec)]


def greedy(prompt: Prompt = "Tell me a story.", **fields: object) -> GenerationSpec:
    return GenerationSpec(**{"prompt": prompt, "max_tokens": 12, "temperature": 0.0} | fields)  # type: ignore[arg-type]


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


async def test_at_least_one_model_is_named_and_ready(service: GenerationService) -> None:
    cards = service.models()

    assert service.is_ready()
    assert cards
    assert all(card.name and card.context_length > 0 for card in cards)


async def test_the_last_chunk_and_only_it_has_the_finish(service: GenerationService) -> None:
    chunks = await run(service, greedy())

    assert [chunk.finish is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.parametrize("prompt", ["Hello", (1, 2, 3), (ChatTurn(role="user", content="Hello"),)])
async def test_every_kind_of_prompt_is_answered(service: GenerationService, prompt: Prompt) -> None:
    finish = (await run(service, greedy(prompt)))[-1].finish

    assert finish is not None
    assert finish.usage.prompt_tokens > 0


async def test_the_usage_counts_the_tokens_of_the_chunks(service: GenerationService) -> None:
    chunks = await run(service, greedy())

    finish = chunks[-1].finish
    assert finish is not None
    assert finish.usage.completion_tokens == sum(len(chunk.token_ids) for chunk in chunks)
    assert 0 <= finish.first_token_s <= finish.total_s


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
async def test_max_tokens_ends_with_length(service: GenerationService, max_tokens: int) -> None:
    finish = (await run(service, greedy(max_tokens=max_tokens)))[-1].finish

    assert finish is not None
    assert (finish.reason, finish.usage.completion_tokens) == (FinishReason.LENGTH, max_tokens)


async def test_a_stop_string_ends_the_text_before_it(service: GenerationService) -> None:
    whole = text_of(await run(service, greedy()))
    stop = whole[len(whole) // 2 :][:4]

    chunks = await run(service, greedy(stop=(stop,)))

    finish = chunks[-1].finish
    assert text_of(chunks) == whole[: whole.index(stop)]
    assert finish is not None
    assert (finish.reason, finish.stop) == (FinishReason.STOP, stop)


async def test_greedy_answers_are_the_same_every_time(service: GenerationService) -> None:
    first, second = await run(service, greedy()), await run(service, greedy())

    assert text_of(first) == text_of(second)


async def test_requests_at_the_same_time_have_their_own_ids_and_answers(service: GenerationService) -> None:
    alone = text_of(await run(service, greedy()))

    answers = await asyncio.gather(*(run(service, greedy()) for _ in range(4)))

    ids = [{chunk.request_id for chunk in answer} for answer in answers]
    assert all(len(own) == 1 for own in ids)
    assert len(set.union(*ids)) == 4
    assert {text_of(answer) for answer in answers} == {alone}


async def test_closing_ends_the_request_and_the_next_one_runs(service: GenerationService) -> None:
    chunks = start(service, greedy(max_tokens=64))
    await anext(chunks)

    await asyncio.wait_for(chunks.aclose(), timeout=5)

    assert (await run(service, greedy()))[-1].finish is not None


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"model": "no-such-model"}, ModelNotFound, "model"),
        ({"max_tokens": 0}, InvalidRequest, "max_tokens"),
        ({"prompt": ""}, InvalidRequest, "prompt"),
        ({"prompt": ()}, InvalidRequest, "prompt"),
        ({"max_tokens": 10**8}, InvalidRequest, "max_tokens"),
    ],
)
async def test_a_request_that_cannot_run_fails_before_its_first_chunk(
    service: GenerationService, fields: dict[str, object], error: type[ServingError], param: str
) -> None:
    with pytest.raises(error) as raised:
        await anext(start(service, greedy(**fields)))  # type: ignore[arg-type]

    assert raised.value.context["param"] == param
    assert (await run(service, greedy()))[-1].finish is not None


async def test_a_deadline_ends_the_request(service: GenerationService) -> None:
    with pytest.raises(DeadlineExceeded):
        await run(service, greedy(max_tokens=100, timeout_s=0.005))

    assert (await run(service, greedy()))[-1].finish is not None
