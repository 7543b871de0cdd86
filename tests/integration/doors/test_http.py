"""The HTTP door on a real socket: one answer at a time, models, metrics."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from deployments.gateway.scripted_service import DEFAULT_MODELS, Script
from deployments.service import ChatTurn
from messages.errors import Overloaded, WorkerLost

MESSAGES: Any = [{"role": "user", "content": "hi"}]
CHAT = {"model": "scripted", "messages": MESSAGES}


async def test_a_completion_is_what_the_openai_client_expects(open_doors: Any) -> None:
    async with open_doors() as doors:
        completion = await doors.openai.chat.completions.create(
            model="scripted", messages=MESSAGES, max_tokens=9, seed=1, stop=["zzz"], extra_body={"top_k": 3}
        )

        assert completion.choices[0].message.content == "Hello \u2028world"
        assert completion.choices[0].finish_reason == "stop"
        assert completion.usage is not None
        assert completion.usage.completion_tokens == 4
        assert completion.usage.prompt_tokens_details is not None
        assert completion.usage.prompt_tokens_details.cached_tokens == 0
        spec = doors.service.specs[0]
        assert spec.prompt == (ChatTurn(role="user", content="hi"),)
        assert (spec.max_tokens, spec.seed, spec.stop, spec.top_k) == (9, 1, ("zzz",), 3)


async def test_one_served_model_needs_not_be_named(open_doors: Any) -> None:
    async with open_doors() as doors:
        response = await doors.http.post("/v1/chat/completions", json={"messages": MESSAGES})

        assert (response.status_code, response.json()["model"]) == (200, "scripted")


async def test_an_unknown_model_is_not_found(open_doors: Any) -> None:
    async with open_doors() as doors:
        with pytest.raises(openai.NotFoundError) as raised:
            await doors.openai.chat.completions.create(model="other", messages=MESSAGES)

        assert (raised.value.code, raised.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parameter", [{"user": "bob"}, {"tools": []}, {"prompt_logprobs": 1}, {"echo": True}])
async def test_an_unsupported_parameter_is_refused_by_name(
    open_doors: Any, parameter: dict[str, Any], *, stream: bool
) -> None:
    async with open_doors() as doors:
        with pytest.raises(openai.BadRequestError, match=next(iter(parameter))) as raised:
            await doors.openai.chat.completions.create(
                model="scripted", messages=MESSAGES, stream=stream, extra_body=parameter
            )

        assert raised.value.param == next(iter(parameter))
        assert doors.service.specs == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status"), [(Overloaded("full", retry_after_s=7), 429), (WorkerLost("gone"), 503)])
async def test_an_error_before_the_first_token_is_a_status(
    open_doors: Any, error: Exception, status: int, *, stream: bool
) -> None:
    async with open_doors(Script(pieces=[], error=error)) as doors:
        response = await doors.http.post("/v1/chat/completions", json=CHAT | {"stream": stream})

        assert response.status_code == status
        assert response.headers["retry-after"] == ("7" if status == 429 else "1")
        assert response.json()["error"]["message"] in ("full", "gone")


async def test_a_crash_says_nothing_of_our_inside(open_doors: Any) -> None:
    async with open_doors(Script(pieces=[], error=ZeroDivisionError("secret"))) as doors:
        response = await doors.http.post("/v1/chat/completions", json=CHAT)

        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert "secret" not in response.text


async def test_a_body_over_the_limit_is_refused_announced_or_not(open_doors: Any) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(17):
            yield b" " * 1024**2

    async with open_doors() as doors:
        announced = await doors.http.post("/v1/chat/completions", content=b" " * (16 * 1024**2 + 1))
        chunked = await doors.http.post("/v1/chat/completions", content=endless())

        assert (announced.status_code, chunked.status_code) == (413, 413)
        assert "16777216" in announced.json()["error"]["message"]


async def test_a_long_prompt_under_the_limit_arrives_whole(open_doors: Any) -> None:
    async with open_doors() as doors:
        doors.service._models = [DEFAULT_MODELS[0].__class__(name="scripted", context_length=2**31)]
        content = "x" * (8 * 1024**2)

        response = await doors.http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]}
        )

        assert response.json()["usage"]["prompt_tokens"] == len(content)


async def test_the_clients_request_id_is_echoed_and_names_nothing_inside(open_doors: Any) -> None:
    async with open_doors() as doors:
        headers = {"x-request-id": "mine"}
        responses = await asyncio.gather(
            *(doors.http.post("/v1/chat/completions", json=CHAT, headers=headers) for _ in range(2))
        )

        assert [response.headers["x-request-id"] for response in responses] == ["mine", "mine"]
        assert len({response.json()["id"] for response in responses} | {"mine"}) == 3
        assert "x-request-id" not in (await doors.http.get("/health")).headers


async def test_unknown_paths_and_methods_have_the_error_shape(open_doors: Any) -> None:
    async with open_doors() as doors:
        missing, wrong = await doors.http.get("/v1/none"), await doors.http.get("/v1/chat/completions")

        assert (missing.status_code, wrong.status_code) == (404, 405)
        assert {"message", "type", "param", "code"} == set(missing.json()["error"]) == set(wrong.json()["error"])
