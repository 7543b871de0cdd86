"""Both doors on real sockets, in front of a scripted service."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kvferry.v1 import inference_pb2, inference_pb2_grpc
from prometheus_client import CollectorRegistry, Counter

from deployments.gateway.listeners import Listeners
from deployments.gateway.scripted_service import DEFAULT_MODELS, Script, ScriptedService
from deployments.service import ChatTurn
from messages.errors import ConfigError, Overloaded, WorkerLost

HELLO = Script(pieces=["Hel", "lo ", "\u2028w", "orld"])
MESSAGES: Any = [{"role": "user", "content": "hi"}]
CHAT = {"model": "scripted", "messages": MESSAGES}


class Doors:
    def __init__(self, service: ScriptedService, listeners: Listeners, registry: CollectorRegistry) -> None:
        self.service = service
        self.listeners = listeners
        self.registry = registry
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{listeners.http_port}", timeout=10)
        self.openai = openai.AsyncOpenAI(api_key="none", base_url=f"{self.http.base_url}/v1", max_retries=0, timeout=10)
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{listeners.grpc_port}")
        self.grpc: Any = inference_pb2_grpc.InferenceStub(self.channel)

    async def close(self) -> None:
        await self.http.aclose()
        await self.openai.close()
        await self.channel.close()


@asynccontextmanager
async def open_doors(script: Script = HELLO, *, is_ready: bool = True, drain_s: float = 5.0) -> AsyncIterator[Doors]:
    service, registry = ScriptedService(script, is_ready=is_ready), CollectorRegistry()
    async with Listeners(service, "127.0.0.1", 0, 0, registry, drain_s) as listeners:
        doors = Doors(service, listeners, registry)
        try:
            yield doors
        finally:
            await doors.close()
    assert service.num_running == 0


async def until(condition: Callable[[], bool], within_s: float = 2.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - the service under test has no event to wait for
            await asyncio.sleep(0.005)


def events(body: str) -> list[tuple[str, Any]]:
    """(event name, data) of a server-sent event stream."""
    found = []
    for block in body.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        found.append((fields.get("event", "message"), data if data == "[DONE]" else json.loads(data)))
    return found


# HTTP, one answer


async def test_a_completion_is_what_the_openai_client_expects() -> None:
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


async def test_one_served_model_needs_not_be_named() -> None:
    async with open_doors() as doors:
        response = await doors.http.post("/v1/chat/completions", json={"messages": MESSAGES})

        assert (response.status_code, response.json()["model"]) == (200, "scripted")


async def test_an_unknown_model_is_not_found() -> None:
    async with open_doors() as doors:
        with pytest.raises(openai.NotFoundError) as raised:
            await doors.openai.chat.completions.create(model="other", messages=MESSAGES)

        assert (raised.value.code, raised.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parameter", [{"n": 2}, {"logprobs": True}, {"user": "bob"}, {"presence_penalty": 0.5}])
async def test_an_unsupported_parameter_is_refused_by_name(parameter: dict[str, Any], *, stream: bool) -> None:
    async with open_doors() as doors:
        with pytest.raises(openai.BadRequestError, match=next(iter(parameter))) as raised:
            await doors.openai.chat.completions.create(
                model="scripted", messages=MESSAGES, stream=stream, extra_body=parameter
            )

        assert raised.value.param == next(iter(parameter))
        assert doors.service.specs == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status"), [(Overloaded("full", retry_after_s=7), 429), (WorkerLost("gone"), 503)])
async def test_an_error_before_the_first_token_is_a_status(error: Exception, status: int, *, stream: bool) -> None:
    async with open_doors(Script(pieces=[], error=error)) as doors:
        response = await doors.http.post("/v1/chat/completions", json=CHAT | {"stream": stream})

        assert response.status_code == status
        assert response.headers["retry-after"] == ("7" if status == 429 else "1")
        assert response.json()["error"]["message"] in ("full", "gone")


async def test_a_crash_says_nothing_of_our_inside() -> None:
    async with open_doors(Script(pieces=[], error=ZeroDivisionError("secret"))) as doors:
        response = await doors.http.post("/v1/chat/completions", json=CHAT)

        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert "secret" not in response.text


async def test_a_body_over_the_limit_is_refused_announced_or_not() -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(17):
            yield b" " * 1024**2

    async with open_doors() as doors:
        announced = await doors.http.post("/v1/chat/completions", content=b" " * (16 * 1024**2 + 1))
        chunked = await doors.http.post("/v1/chat/completions", content=endless())

        assert (announced.status_code, chunked.status_code) == (413, 413)
        assert "16777216" in announced.json()["error"]["message"]


async def test_a_long_prompt_under_the_limit_arrives_whole() -> None:
    async with open_doors() as doors:
        doors.service._models = [DEFAULT_MODELS[0].__class__(name="scripted", context_length=2**31)]
        content = "x" * (8 * 1024**2)

        response = await doors.http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]}
        )

        assert response.json()["usage"]["prompt_tokens"] == len(content)


async def test_the_clients_request_id_is_echoed_and_names_nothing_inside() -> None:
    async with open_doors() as doors:
        headers = {"x-request-id": "mine"}
        responses = await asyncio.gather(
            *(doors.http.post("/v1/chat/completions", json=CHAT, headers=headers) for _ in range(2))
        )

        assert [response.headers["x-request-id"] for response in responses] == ["mine", "mine"]
        assert len({response.json()["id"] for response in responses} | {"mine"}) == 3
        assert "x-request-id" not in (await doors.http.get("/health")).headers


async def test_unknown_paths_and_methods_have_the_error_shape() -> None:
    async with open_doors() as doors:
        missing, wrong = await doors.http.get("/v1/none"), await doors.http.get("/v1/chat/completions")

        assert (missing.status_code, wrong.status_code) == (404, 405)
        assert {"message", "type", "param", "code"} == set(missing.json()["error"]) == set(wrong.json()["error"])


# HTTP, streamed


async def test_a_stream_is_what_the_openai_client_expects() -> None:
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


async def test_usage_is_a_field_of_every_chunk_only_when_asked_for() -> None:
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
async def test_an_error_in_mid_stream_is_an_error_event_and_no_done(error: BaseException, code: str) -> None:
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


async def test_the_openai_client_raises_on_an_error_in_mid_stream() -> None:
    async with open_doors(Script(pieces=["a", "b"], error=WorkerLost("the worker died"))) as doors:
        stream = await doors.openai.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)
        seen: list[Any] = []

        with pytest.raises(openai.APIError, match="the worker died"):
            await _read_into(seen, stream)

        assert "".join(chunk.choices[0].delta.content or "" for chunk in seen) == "ab"


async def test_tokens_arrive_while_the_answer_goes_on() -> None:
    async with open_doors(Script(pieces=["a"], hang=True)) as doors:
        stream = await doors.openai.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)

        first, second = await anext(stream), await anext(stream)

        assert (first.choices[0].delta.role, second.choices[0].delta.content) == ("assistant", "a")
        await stream.close()
        await until(lambda: doors.service.num_running == 0)


# A client that goes away


@pytest.mark.parametrize("pieces", [[], ["a"]])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_ends_its_request(pieces: list[str], *, stream: bool) -> None:
    async with open_doors(Script(pieces=pieces, hang=True)) as doors:
        call = asyncio.create_task(doors.http.post("/v1/chat/completions", json=CHAT | {"stream": stream}))
        await until(lambda: doors.service.num_running == 1)
        await asyncio.sleep(0.05)

        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

        await until(lambda: doors.service.num_running == 0, within_s=1.0)


async def test_a_client_that_reads_nothing_and_leaves_ends_its_request() -> None:
    async with open_doors(Script(pieces=["x" * 100_000] * 2_000)) as doors:
        reader, writer = await asyncio.open_connection("127.0.0.1", doors.listeners.http_port, limit=1024)
        body = json.dumps(CHAT | {"stream": True}).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )
        await reader.readexactly(10)
        assert doors.service.num_running == 1

        writer.close()

        await until(lambda: doors.service.num_running == 0, within_s=2.0)


@pytest.mark.parametrize("pieces", [[], ["a"]])
async def test_a_cancelled_call_ends_its_request(pieces: list[str]) -> None:
    async with open_doors(Script(pieces=pieces, hang=True)) as doors:
        call = doors.grpc.Generate(inference_pb2.GenerateRequest(text="hi"))
        if pieces:
            assert (await call.read()).text == "a"
        await until(lambda: doors.service.num_running == 1)

        call.cancel()

        await until(lambda: doors.service.num_running == 0, within_s=1.0)


async def test_the_deadline_of_a_call_is_the_requests_and_ends_it() -> None:
    async with open_doors(Script(pieces=["a"], hang=True)) as doors:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            _ = [chunk async for chunk in doors.grpc.Generate(inference_pb2.GenerateRequest(text="hi"), timeout=0.3)]

        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        timeout_s = doors.service.specs[0].timeout_s
        assert timeout_s is not None
        assert 0 < timeout_s <= 0.3
        await until(lambda: doors.service.num_running == 0, within_s=1.0)


# gRPC


async def test_generate_streams_text_tokens_and_one_finish() -> None:
    async with open_doors() as doors:
        sampling = inference_pb2.SamplingParams(max_tokens=3, temperature=0.0, top_k=2, seed=2**64 - 1, stop=["zz"])
        request = inference_pb2.GenerateRequest(
            model="scripted", token_ids=inference_pb2.TokenIds(ids=[4, 5]), sampling=sampling
        )

        chunks = [chunk async for chunk in doors.grpc.Generate(request)]

        assert "".join(chunk.text for chunk in chunks) == "Hello \u2028w"
        assert [token_id for chunk in chunks for token_id in chunk.token_ids] == [0, 1, 2]
        assert [chunk.HasField("finish") for chunk in chunks] == [False, False, True]
        assert chunks[-1].finish.reason == inference_pb2.FINISH_REASON_LENGTH
        assert chunks[-1].finish.usage.prompt_tokens == 2
        spec = doors.service.specs[0]
        assert (spec.prompt, spec.temperature, spec.seed, spec.timeout_s) == ((4, 5), 0.0, 2**64 - 1, None)


async def test_chat_passes_the_turns_on() -> None:
    async with open_doors() as doors:
        messages = [inference_pb2.ChatMessage(role="system", content=""), inference_pb2.ChatMessage(**MESSAGES[0])]

        chunks = [chunk async for chunk in doors.grpc.Chat(inference_pb2.ChatRequest(messages=messages))]

        assert chunks[-1].finish.reason == inference_pb2.FINISH_REASON_STOP
        assert doors.service.specs[0].prompt == (
            ChatTurn(role="system", content=""),
            ChatTurn(role="user", content="hi"),
        )


async def test_models_are_the_same_at_both_doors() -> None:
    async with open_doors() as doors:
        over_grpc = (await doors.grpc.Models(inference_pb2.ModelsRequest())).models
        over_http = (await doors.openai.models.list()).data
        one = await doors.openai.models.retrieve("scripted")

        assert [model.name for model in over_grpc] == [model.id for model in over_http] == [one.id] == ["scripted"]
        with pytest.raises(openai.NotFoundError):
            await doors.openai.models.retrieve("some/other")


@pytest.mark.parametrize(
    ("request_", "names"),
    [
        (inference_pb2.GenerateRequest(), "prompt"),
        (inference_pb2.GenerateRequest(text=""), "prompt"),
        (inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds()), "prompt"),
        (
            inference_pb2.GenerateRequest(text="x", sampling=inference_pb2.SamplingParams(max_tokens=0)),
            "max_tokens must be in 1..2147483647",
        ),
        (
            inference_pb2.GenerateRequest(text="x", sampling=inference_pb2.SamplingParams(temperature=float("nan"))),
            "temperature must be in [0, 2]",
        ),
        (
            inference_pb2.GenerateRequest(text="x", sampling=inference_pb2.SamplingParams(stop=["x"] * 17)),
            "stop must be a string or a list of 1..16",
        ),
        # Field 99, a varint; in the request and inside `sampling` (field 4).
        (inference_pb2.GenerateRequest.FromString(b"\x12\x01x\x98\x06\x01"), "field number 99"),
        (
            inference_pb2.GenerateRequest.FromString(b"\x12\x01x\x22\x03\x98\x06\x01"),
            "field number 99 of kvferry.v1.SamplingParams",
        ),
    ],
)
async def test_a_wrong_generate_request_is_an_invalid_argument(
    request_: inference_pb2.GenerateRequest, names: str
) -> None:
    async with open_doors() as doors:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await doors.grpc.Generate(request_).read()

        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert names in (raised.value.details() or "")
        assert doors.service.specs == []


@pytest.mark.parametrize(
    ("request_", "names"),
    [
        (inference_pb2.ChatRequest(), "messages"),
        (
            inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(role="tool")]),
            "messages.0.role must be one of system, user, assistant",
        ),
        (
            inference_pb2.ChatRequest.FromString(b"\x12\x08\x0a\x04user\x18\x01"),
            "field number 3 of kvferry.v1.ChatMess",
        ),
    ],
)
async def test_a_wrong_chat_request_is_an_invalid_argument(request_: inference_pb2.ChatRequest, names: str) -> None:
    async with open_doors() as doors:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await doors.grpc.Chat(request_).read()

        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert names in (raised.value.details() or "")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (Overloaded("full", internal="secret"), grpc.StatusCode.RESOURCE_EXHAUSTED, "full"),
        (WorkerLost("gone"), grpc.StatusCode.UNAVAILABLE, "gone"),
        (ZeroDivisionError("secret"), grpc.StatusCode.INTERNAL, "internal error"),
    ],
)
async def test_an_error_is_the_status_of_the_call_also_in_mid_stream(
    error: BaseException, code: grpc.StatusCode, message: str
) -> None:
    async with open_doors(Script(pieces=["a"], error=error)) as doors:
        call = doors.grpc.Generate(inference_pb2.GenerateRequest(text="hi"))
        assert (await call.read()).text == "a"

        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()

        assert (raised.value.code(), raised.value.details()) == (code, message)


async def test_metadata_gives_the_clients_request_id_back() -> None:
    async with open_doors() as doors:
        call = doors.grpc.Generate(inference_pb2.GenerateRequest(text="hi"), metadata=(("x-request-id", "mine"),))
        chunk = await call.read()

        assert ("x-request-id", "mine") in [tuple(pair) for pair in await call.initial_metadata()]
        assert chunk.request_id != "mine"


async def test_an_eight_megabyte_prompt_passes_over_grpc() -> None:
    async with open_doors() as doors:
        doors.service._models = [DEFAULT_MODELS[0].__class__(name="scripted", context_length=2**31 - 1)]
        request = inference_pb2.GenerateRequest(text="x" * (8 * 1024**2))

        chunks = [chunk async for chunk in doors.grpc.Generate(request)]

        assert chunks[-1].finish.usage.prompt_tokens == 8 * 1024**2


async def test_reflection_lists_the_services() -> None:
    async with open_doors() as doors:
        stub = reflection_pb2_grpc.ServerReflectionStub(doors.channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))

        services = {service.name for service in (await call.read()).list_services_response.service}

        assert {"kvferry.v1.Inference", "grpc.health.v1.Health"} <= services
        call.cancel()


# Health


async def test_health_follows_the_service_at_both_doors() -> None:
    async with open_doors(is_ready=False) as doors:
        stub = health_pb2_grpc.HealthStub(doors.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="kvferry.v1.Inference"))
        before = (await stub.Check(health_pb2.HealthCheckRequest())).status
        seen = [(await watch.read()).status]
        not_ready = await doors.http.get("/ready")

        doors.service.ready = True

        seen.append((await watch.read()).status)
        response = health_pb2.HealthCheckResponse
        assert [before, *seen] == [response.NOT_SERVING, response.NOT_SERVING, response.SERVING]
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == response.SERVING
        assert (not_ready.status_code, (await doors.http.get("/ready")).status_code) == (503, 200)
        assert (await doors.http.get("/health")).status_code == 200
        watch.cancel()


async def test_health_of_an_unknown_service_is_not_found() -> None:
    async with open_doors() as doors:
        stub = health_pb2_grpc.HealthStub(doors.channel)

        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Check(health_pb2.HealthCheckRequest(service="other"))

        assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def test_metrics_are_those_of_the_registry() -> None:
    async with open_doors() as doors:
        Counter("kvferry_things", "Things.", registry=doors.registry).inc(3)

        response = await doors.http.get("/metrics")

        assert "kvferry_things_total 3.0" in response.text
        assert response.headers["content-type"].startswith("text/plain; version=")


# Ports and stopping


@pytest.mark.parametrize(("taken", "option"), [("grpc", "--grpc-port"), ("http", "--http-port")])
async def test_a_port_in_use_is_named_and_nothing_is_started(taken: str, option: str) -> None:
    async with open_doors() as doors:
        ports = {"grpc": 0, "http": 0} | {taken: getattr(doors.listeners, f"{taken}_port")}
        second = Listeners(doors.service, "127.0.0.1", ports["grpc"], ports["http"], CollectorRegistry())

        with pytest.raises(ConfigError, match=rf"port {ports[taken]} .* in use; choose another with {option}"):
            await second.__aenter__()

        assert (await doors.http.get("/health")).status_code == 200


async def test_a_port_that_shares_with_others_is_in_use_too() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        service = ScriptedService(HELLO)

        with pytest.raises(ConfigError, match="--grpc-port"):
            await Listeners(service, "127.0.0.1", other.getsockname()[1], 0, CollectorRegistry()).__aenter__()


async def test_a_host_that_is_not_ours_is_a_config_error() -> None:
    for host in ("no.such.host.invalid", "192.0.2.1"):
        with pytest.raises(ConfigError, match=host):
            await Listeners(ScriptedService(HELLO), host, 0, 0, CollectorRegistry()).__aenter__()


async def test_ports_are_free_again_after_the_stop() -> None:
    async with open_doors() as doors:
        await doors.http.get("/health")
        ports = doors.listeners.grpc_port, doors.listeners.http_port

    async with Listeners(ScriptedService(HELLO), "127.0.0.1", *ports, CollectorRegistry()) as again:
        assert (again.grpc_port, again.http_port) == ports


async def test_running_requests_end_well_within_the_drain() -> None:
    async with open_doors(Script(pieces=["a"] * 5, delay_s=0.1)) as doors:
        over_http = asyncio.create_task(doors.http.post("/v1/chat/completions", json=CHAT | {"stream": True}))
        call = doors.grpc.Generate(inference_pb2.GenerateRequest(text="hi"))
        await until(lambda: doors.service.num_running == 2)

        await doors.listeners.stop(5.0)

        assert (await over_http).text.endswith("data: [DONE]\n\n")
        assert [chunk.HasField("finish") async for chunk in call][-1]


async def test_a_body_that_never_ends_does_not_hold_the_stop_up() -> None:
    async with open_doors() as doors:
        _, writer = await asyncio.open_connection("127.0.0.1", doors.listeners.http_port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        await doors.http.get("/health")

        async with asyncio.timeout(5):
            await doors.listeners.stop(0.0)

        writer.close()


async def test_requests_that_outlast_the_drain_are_cut_and_closed() -> None:
    async with open_doors(Script(pieces=["a"], hang=True)) as doors:
        streamed = asyncio.create_task(doors.http.post("/v1/chat/completions", json=CHAT | {"stream": True}))
        whole = asyncio.create_task(doors.http.post("/v1/chat/completions", json=CHAT))
        call = doors.grpc.Generate(inference_pb2.GenerateRequest(text="hi"))
        await until(lambda: doors.service.num_running == 3)
        started = time.monotonic()

        await doors.listeners.stop(0.5)

        assert time.monotonic() - started < 3
        assert doors.service.num_running == 0
        assert events((await streamed).text)[-1][1]["error"]["code"] == "draining"
        assert ((await whole).status_code, (await whole).json()["error"]["code"]) == (503, "draining")
        with pytest.raises(grpc.aio.AioRpcError):
            _ = [chunk async for chunk in call]
