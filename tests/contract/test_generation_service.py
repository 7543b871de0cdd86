"""What every GenerationService promises the doors; a new one adds its factory to FACTORIES."""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache
from pathlib import Path
from typing import cast

import pytest

from deployments.gateway.scripted_service import Script, ScriptedService
from deployments.service import ChatTurn, Chunk, Finish, GenerationService, GenerationSpec, Prompt, Summary
from engine.tokenizer import Tokenizer
from messages.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, ServingError
from messages.tokens import FinishReason
from tests.contract.scripted_router import (
    END,
    ONCE,
    THERE,
    TIME,
    UPON,
    WAS,
    A,
    ScriptedRouter,
    make_text_service,
    make_tokenizer,
)

Factory = Callable[[], AbstractAsyncContextManager[GenerationService]]


@asynccontextmanager
async def scripted() -> AsyncIterator[GenerationService]:
    service = ScriptedService(Script(pieces=[" once", " upon", " a", " time", " there", " was"] * 20, delay_s=0.001))
    yield service
    assert service.num_running == 0


@cache
def words() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return make_tokenizer(Path(folder))


@asynccontextmanager
async def tokenized() -> AsyncIterator[GenerationService]:
    router = ScriptedRouter([ONCE, UPON, A, TIME, THERE, WAS] * 20 + [END], delay_s=0.001)
    service = make_text_service(words(), router)
    yield service
    assert (service.num_running, router.num_running) == (0, 0)


FACTORIES: list[Factory] = [scripted, tokenized]


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


def finish_of(chunks: list[Chunk]) -> Finish:
    (finish,) = [chunk.finish for chunk in chunks if chunk.finish is not None]
    return finish


def summary_of(chunks: list[Chunk]) -> Summary:
    summary = chunks[-1].summary
    assert summary is not None
    return summary


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


async def test_at_least_one_model_is_named_and_ready(service: GenerationService) -> None:
    cards = service.models()

    assert service.is_ready()
    assert cards
    assert all(card.name and card.context_length > 0 for card in cards)


async def test_the_last_chunk_and_only_it_has_the_finish_and_the_summary(service: GenerationService) -> None:
    chunks = await run(service, greedy())

    last_only = [False] * (len(chunks) - 1) + [True]
    assert [chunk.finish is not None for chunk in chunks] == last_only
    assert [chunk.summary is not None for chunk in chunks] == last_only


@pytest.mark.parametrize("prompt", ["Hello", (1, 2, 3), (ChatTurn(role="user", content="Hello"),)])
async def test_every_kind_of_prompt_is_answered(service: GenerationService, prompt: Prompt) -> None:
    assert summary_of(await run(service, greedy(prompt))).usage.prompt_tokens > 0


async def test_the_usage_counts_the_tokens_of_the_chunks(service: GenerationService) -> None:
    chunks = await run(service, greedy())

    summary = summary_of(chunks)
    assert summary.usage.completion_tokens == sum(len(chunk.token_ids) for chunk in chunks)
    assert 0 <= summary.first_token_s <= summary.total_s


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
async def test_max_tokens_ends_with_length(service: GenerationService, max_tokens: int) -> None:
    chunks = await run(service, greedy(max_tokens=max_tokens))

    assert finish_of(chunks) == Finish(reason=FinishReason.LENGTH)
    assert summary_of(chunks).usage.completion_tokens == max_tokens


async def test_a_stop_string_ends_the_text_before_it(service: GenerationService) -> None:
    whole = text_of(await run(service, greedy()))
    stop = whole[len(whole) // 2 :][:4]

    chunks = await run(service, greedy(stop=(stop,)))

    assert text_of(chunks) == whole[: whole.index(stop)]
    assert finish_of(chunks) == Finish(reason=FinishReason.STOP, stop=stop)


async def test_a_stop_string_can_stay_in_the_text(service: GenerationService) -> None:
    whole = text_of(await run(service, greedy()))
    stop = whole[len(whole) // 2 :][:4]

    chunks = await run(service, greedy(stop=(stop,), include_stop=True))

    assert text_of(chunks) == whole[: whole.index(stop)] + stop


async def test_a_stop_token_of_the_client_ends_the_text_before_it_and_is_named(service: GenerationService) -> None:
    token_ids = [token_id for chunk in await run(service, greedy()) for token_id in chunk.token_ids]
    stop = token_ids[3]

    without = await run(service, greedy(stop_token_ids=(stop,)))
    with_it = await run(service, greedy(stop_token_ids=(stop,), include_stop=True))

    assert finish_of(without) == finish_of(with_it) == Finish(reason=FinishReason.STOP, stop=stop)
    assert [token_id for chunk in without for token_id in chunk.token_ids][-1] == stop
    assert text_of(with_it).startswith(text_of(without))
    assert len(text_of(with_it)) > len(text_of(without))


async def test_the_models_own_end_has_no_name_and_can_be_ignored(service: GenerationService) -> None:
    ended = await run(service, greedy(max_tokens=200))
    ignored = await run(service, greedy(max_tokens=200, ignore_eos=True))

    assert finish_of(ended) == Finish(reason=FinishReason.STOP)
    assert finish_of(ignored) == Finish(reason=FinishReason.LENGTH)
    assert summary_of(ignored).usage.completion_tokens == 200


async def test_the_first_min_tokens_tokens_end_nothing(service: GenerationService) -> None:
    chunks = await run(service, greedy())
    first, token_ids = text_of(chunks[:1]), [token_id for chunk in chunks for token_id in chunk.token_ids]

    at_string = await run(service, greedy(min_tokens=4, stop=(first[-2:],)))
    at_token = await run(service, greedy(min_tokens=4, stop_token_ids=(token_ids[0],)))
    past_the_end = await run(service, greedy(min_tokens=150, max_tokens=160))

    assert text_of(at_string).startswith(first)
    assert finish_of(at_string) == Finish(reason=FinishReason.STOP, stop=first[-2:])
    assert summary_of(at_string).usage.completion_tokens > 4
    assert summary_of(at_token).usage.completion_tokens > 4
    assert summary_of(past_the_end).usage.completion_tokens > 150


async def test_every_choice_has_one_finish_and_the_usage_counts_them_all(service: GenerationService) -> None:
    alone = await run(service, greedy())

    chunks = await run(service, greedy(n=3))

    assert sorted(chunk.choice for chunk in chunks if chunk.finish is not None) == [0, 1, 2]
    assert [chunk.summary is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    for choice in range(3):
        own = [chunk for chunk in chunks if chunk.choice == choice]
        assert own[-1].finish == finish_of(alone)
        assert text_of(own) == text_of(alone)
    usage = summary_of(chunks).usage
    assert usage.completion_tokens == 3 * summary_of(alone).usage.completion_tokens
    assert usage.prompt_tokens == summary_of(alone).usage.prompt_tokens


@pytest.mark.parametrize("num_top", [0, 2])
async def test_every_token_has_its_log_probability_when_asked_for(service: GenerationService, num_top: int) -> None:
    chunks = await run(service, greedy(logprobs=num_top, n=2))

    assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)
    for chunk in chunks:
        assert [token.token_id for token in chunk.logprobs] == list(chunk.token_ids)
        assert all(len(token.top) == num_top and token.logprob <= 0 for token in chunk.logprobs)
        assert all(token.text == token.data.decode() for token in chunk.logprobs)
    assert not any(chunk.logprobs for chunk in await run(service, greedy()))


async def test_every_prompt_token_but_the_first_has_its_log_probability(service: GenerationService) -> None:
    chunks = await run(service, greedy((1, 2, 3), prompt_logprobs=1, n=2))

    first, *others = [token for chunk in chunks for token in chunk.prompt_logprobs]
    assert first is None
    assert [token.token_id for token in others if token is not None] == [2, 3]
    assert {chunk.choice for chunk in chunks if chunk.prompt_logprobs} == {0}


async def test_an_echo_begins_every_choice_with_the_prompt_and_counts_for_nothing(service: GenerationService) -> None:
    alone = await run(service, greedy("Tell me"))

    chunks = await run(service, greedy("Tell me", echo=True, n=2, stop=("Tell",)))

    for choice in range(2):
        assert text_of([chunk for chunk in chunks if chunk.choice == choice]) == "Tell me" + text_of(alone)
    assert summary_of(chunks).usage.completion_tokens == 2 * summary_of(alone).usage.completion_tokens


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


REFUSED = pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"model": "no-such-model"}, ModelNotFound, "model"),
        ({"max_tokens": 0}, InvalidRequest, "max_tokens"),
        ({"prompt": ""}, InvalidRequest, "prompt"),
        ({"prompt": ()}, InvalidRequest, "prompt"),
        ({"max_tokens": 10**8}, InvalidRequest, "max_tokens"),
        ({"prompt": (10**6,)}, InvalidRequest, "prompt"),
        ({"logit_bias": ((10**6, 1.0),)}, InvalidRequest, "logit_bias"),
        ({"allowed_token_ids": (1, 10**6)}, InvalidRequest, "allowed_token_ids"),
        ({"stop_token_ids": (10**6,)}, InvalidRequest, "stop_token_ids"),
    ],
)


@REFUSED
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


@pytest.mark.parametrize("prompt", ["Hello", (1, 2, 3), (ChatTurn(role="user", content="Hello"),)])
async def test_an_explanation_counts_the_prompt_as_its_run_does_and_names_who_decodes(
    service: GenerationService, prompt: Prompt
) -> None:
    explanation = await service.explain(greedy(prompt))

    assert explanation.prompt_tokens == summary_of(await run(service, greedy(prompt))).usage.prompt_tokens
    chosen = explanation.placement.decode.chosen
    assert chosen is not None
    assert chosen.is_allowed
    assert chosen.worker_id in [each.worker_id for each in explanation.placement.decode.candidates]


@REFUSED
async def test_what_cannot_run_is_not_explained_either(
    service: GenerationService, fields: dict[str, object], error: type[ServingError], param: str
) -> None:
    with pytest.raises(error) as raised:
        await service.explain(greedy(**fields))  # type: ignore[arg-type]

    assert raised.value.context["param"] == param


async def test_a_deadline_ends_an_explanation(service: GenerationService) -> None:
    with pytest.raises(DeadlineExceeded):
        await service.explain(greedy(timeout_s=0.0005))

    assert (await service.explain(greedy())).prompt_tokens > 0


async def test_explanations_do_not_disturb_a_request_that_runs(service: GenerationService) -> None:
    alone = text_of(await run(service, greedy()))
    chunks = start(service, greedy())
    first = await anext(chunks)

    explained = await asyncio.gather(*(service.explain(greedy()) for _ in range(4)))

    assert first.text + text_of([chunk async for chunk in chunks]) == alone
    assert len({explanation.prompt_tokens for explanation in explained}) == 1
