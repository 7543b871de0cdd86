"""What the service asks of the router, and when it leaves."""

from contextlib import aclosing
from typing import Any

import pytest

from deployments.config import LimitsConfig
from deployments.gateway.text_service import TextService
from deployments.service import ChatTurn, Chunk, GenerationSpec
from engine.tokenizer import Tokenizer
from messages.errors import InvalidRequest, Overloaded, Unavailable
from telemetry.metrics import GatewayMetrics, WorkerSample
from tests.contract.scripted_router import (
    END,
    ONCE,
    TIME,
    UPON,
    A,
    ScriptedRouter,
    make_text_service,
    make_tokenizer,
)


class NoLinks:
    """A gateway without workers, as its metrics see it."""

    def samples(self) -> list[WorkerSample]:
        return []


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("words"))


async def run(tokenizer: Tokenizer, router: ScriptedRouter, **fields: Any) -> list[Chunk]:
    given: dict[str, Any] = {"prompt": "once upon", "max_tokens": 8} | fields
    spec = GenerationSpec(**given)
    return [chunk async for chunk in make_text_service(tokenizer, router).generate(spec)]


async def test_the_request_carries_ids_sampling_priority_and_a_salt_of_the_tenant(tokenizer: Tokenizer) -> None:
    router = ScriptedRouter([END])

    await run(tokenizer, router, priority=-3, n=2, stop_token_ids=(TIME,), timeout_s=5.0)
    await run(tokenizer, router, tenant="a")

    first, second = router.requests
    assert first.prompt_token_ids == (ONCE, UPON)
    assert (first.priority, first.sampling.n, first.salt) == (-3, 2, b"")
    assert first.timeout_s is not None
    # What has passed since it came is taken off.
    assert 4.0 < first.timeout_s < 5.0
    assert (first.sampling.end_token_ids, first.sampling.stop_token_ids) == ((END,), (TIME,))
    assert second.salt
    assert first.request_id != second.request_id


async def test_it_leaves_when_every_choice_has_its_stop_string(tokenizer: Tokenizer) -> None:
    router = ScriptedRouter([ONCE, UPON, A, TIME])

    chunks = await run(tokenizer, router, n=2, stop=("upon",), max_tokens=100)

    assert router.num_running == 0
    assert chunks[-1].summary is not None
    assert chunks[-1].summary.usage.completion_tokens == 4
    assert [chunk.choice for chunk in chunks if chunk.finish is not None] == [0, 1]


async def test_closing_between_chunks_ends_the_route(tokenizer: Tokenizer) -> None:
    router = ScriptedRouter([ONCE])
    service = make_text_service(tokenizer, router)
    spec = GenerationSpec(prompt="once", prompt_logprobs=0, n=2)

    async with aclosing(service.generate(spec)) as chunks:
        assert (await anext(chunks)).prompt_logprobs == (None,)
        assert router.num_running == 1

    assert (router.num_running, service.num_running) == (0, 0)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [("once  upon", "once  upon"), ((ONCE, A), "oncea"), ((ChatTurn(role="user", content="a"),), "a")],
)
async def test_an_echo_is_the_prompts_own_text(tokenizer: Tokenizer, prompt: Any, text: str) -> None:
    chunks = await run(tokenizer, ScriptedRouter([TIME, END]), prompt=prompt, echo=True)

    assert "".join(chunk.text for chunk in chunks) == f"{text}time"


async def test_a_token_id_out_of_the_vocabulary_never_reaches_a_worker(tokenizer: Tokenizer) -> None:
    router = ScriptedRouter([END])

    for fields in ({"prompt": (99,)}, {"logit_bias": ((99, 1.0),)}, {"stop_token_ids": (99,)}):
        with pytest.raises(InvalidRequest, match="token id 99 is not in the vocabulary"):
            await run(tokenizer, router, **fields)

    assert router.requests == []
    assert (await run(tokenizer, router))[-1].summary is not None


async def test_an_explanation_asks_about_the_request_that_would_be_sent_and_sends_none(tokenizer: Tokenizer) -> None:
    router = ScriptedRouter([END])
    spec = GenerationSpec(prompt="once upon", max_tokens=8, tenant="a", stop_token_ids=(TIME,), seed=7)
    service = make_text_service(tokenizer, router)

    explanation = await service.explain(spec)
    async with aclosing(service.generate(spec)) as chunks:
        await anext(chunks)

    (explained,), (sent,) = router.explained, router.requests
    assert explanation.prompt_tokens == 2
    assert (explained.prompt_token_ids, explained.sampling, explained.salt) == (
        sent.prompt_token_ids,
        sent.sampling,
        sent.salt,
    )
    assert explained.request_id != sent.request_id


async def test_a_gateway_that_is_full_or_about_to_stop_explains_nothing(tokenizer: Tokenizer) -> None:
    """Rule 19: questions are bounded like requests."""
    router, limits = ScriptedRouter([ONCE]), LimitsConfig(max_queue=1)
    service = TextService("scripted", tokenizer, router, GatewayMetrics(NoLinks()), limits)
    spec = GenerationSpec(prompt="once", max_tokens=8)

    async with aclosing(service.generate(spec)) as chunks:
        await anext(chunks)
        with pytest.raises(Overloaded):
            await service.explain(spec)
    assert (await service.explain(spec)).prompt_tokens == 1
    service.is_draining = True
    with pytest.raises(Unavailable):
        await service.explain(spec)

    assert service.num_running == 0
    assert len(router.explained) == 1
