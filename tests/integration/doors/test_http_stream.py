"""The HTTP door on a real socket: server-sent events, and clients that go away."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import openai
import pytest

from deployments.gateway.scripted_service import Script
from kvferry.v1 import inference_pb2
from messages.errors import WorkerLost

MESSAGES: Any = [{"role": "user", "content": "hi"}]
CHAT = {"model": "scripted", "messages": MESSAGES}


def events(body: str) -> list[tuple[str, Any]]:
    """(event name, data) of a server-sent event stream."""
    found = []
    for block in body.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        found.append((fields.get("event", "message"), data if data == "[DONE]" else json.loads(data)))
    return found


async def test_a_stream_is_what_the_openai_client_expects(open_doors: Any) -> None:
    async with open_doors() as doors:
        stream = await doors.openai.chat.completions.create(
            model="scripted", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]

        *parts, usage = chunks
        assert parts[0].choices[0].delta.role == "assistant"
        assert "".join(part.choices[0].delta.content or "" for part in parts) == "Hello \u2028world"
        assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + ["stop"]
        assert all(part.usage is None for part in parts)
        assert usage.choices == []
        assert usage.usage is not None
        assert usage.usage.completion_tokens == 4
        assert len({chunk.id for chunk in chunks}) == 1


async def test_usage_is_a_field_of_every_chunk_only_when_asked_for(open_doors: Any) -> None:
    async with open_doors() as doors:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        asked = events((await doors.http.post("/v1/chat/completions", json=CHAT | options)).text)
        not_asked = events((await doors.http.post("/v1/chat/completions", json=CHAT | {"stream": True})).text)

        assert asked[-1] == not_asked[-1] == ("message", "[DONE]")
        assert all("usage" in data for _, data in asked[:-1])
        assert not any("usage" in data or not data["choices"] for _, data in not_asked[:-1])


@pytest.mark.parametrize(
    ("error", "code"), [(WorkerLost("the worker died"), "worker_lost"), (ZeroDivisionError("secret"), "serving_error")]
)
async def test_an_error_in_mid_stream_is_an_error_event_and_no_done(
    open_doors: Any, error: BaseException, code: str
) -> None:
    async with open_doors(Script(pieces=["a", "b"], error=error)) as doors:
        body = (await doors.http.post("/v1/chat/completions", json=CHAT | {"stream": True})).text

        *chunks, (name, data) = events(body)
        assert name == "error"
        assert data["error"]["code"] == code
        assert "secret" not in body
        assert "[DONE]" not in body
        assert all(chunk["choices"][0]["finish_reason"] is None for _, chunk in chunks)


async def _read_into(seen: list[Any], stream: AsyncIterator[Any]) -> None:
    async for chunk in stream:
        seen.append(chunk)  # noqa: PERF401 - what came before the error must stay


async def test_the_openai_client_raises_on_an_error_in_mid_stream(open_doors: Any) -> None:
    async with open_doors(Script(pieces=["a", "b"], error=WorkerLost("the worker died"))) as doors:
        stream = await doors.openai.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)
        seen: list[Any] = []

        with pytest.raises(openai.APIError, match="the worker died"):
            await _read_into(seen, stream)

        assert "".join(chunk.choices[0].delta.content or "" for chunk in seen) == "ab"


async def test_tokens_arrive_while_the_answer_goes_on(open_doors: Any) -> None:
    async with open_doors(Script(pieces=["a"], hang=True)) as doors:
        stream = await doors.openai.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)

        first, second = await anext(stream), await anext(stream)

        assert (first.choices[0].delta.role, second.choices[0].delta.content) == ("assistant", "a")
        await stream.close()
        await doors.until_running(0)


@pytest.mark.parametrize("pieces", [[], ["a"]])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_ends_its_request(open_doors: Any, pieces: list[str], *, stream: bool) -> None:
    async with open_doors(Script(pieces=pieces, hang=True)) as doors:
        call = asyncio.create_task(doors.http.post("/v1/chat/completions", json=CHAT | {"stream": stream}))
        await doors.until_running(1)
        await asyncio.sleep(0.05)

        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

        await doors.until_running(0)


async def test_a_client_that_reads_nothing_and_leaves_ends_its_request(open_doors: Any) -> None:
    async with open_doors(Script(pieces=["x" * 100_000] * 2_000)) as doors:
        reader, writer = await asyncio.open_connection("127.0.0.1", doors.listeners.http_port, limit=1024)
        body = json.dumps(CHAT | {"stream": True}).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )
        await reader.readexactly(10)
        assert doors.service.num_running == 1

        writer.close()

        await doors.until_running(0)


@pytest.mark.parametrize("pieces", [[], ["a"]])
async def test_a_cancelled_call_ends_its_request(open_doors: Any, pieces: list[str]) -> None:
    async with open_doors(Script(pieces=pieces, hang=True)) as doors:
        call = doors.grpc.Generate(inference_pb2.GenerateRequest(text="hi"))
        if pieces:
            assert (await call.read()).text == "a"
        await doors.until_running(1)

        call.cancel()

        await doors.until_running(0)


async def test_the_deadline_of_a_call_is_the_requests_and_ends_it(open_doors: Any) -> None:
    async with open_doors(Script(pieces=["a"], hang=True)) as doors:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            _ = [chunk async for chunk in doors.grpc.Generate(inference_pb2.GenerateRequest(text="hi"), timeout=2.0)]

        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        timeout_s = doors.service.specs[0].timeout_s
        assert timeout_s is not None
        assert 0 < timeout_s <= 2.0
        await doors.until_running(0)
