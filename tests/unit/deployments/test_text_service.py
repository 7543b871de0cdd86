"""What the service asks of the router, and when it leaves."""

from contextlib import aclosing
from typing import Any

import pytest

from deployments.service import ChatTurn, Chunk, GenerationSpec
from engine.tokenizer import Tokenizer
from messages.errors import InvalidRequest
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
