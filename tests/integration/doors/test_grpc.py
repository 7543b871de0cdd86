"""The gRPC door on a real socket."""

from typing import Any

import grpc
import openai
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from deployments.gateway.scripted_service import DEFAULT_MODELS, Script
from deployments.service import ChatTurn
from kvferry.v1 import inference_pb2
from messages.errors import Overloaded, WorkerLost

MESSAGES: Any = [{"role": "user", "content": "hi"}]


async def test_generate_streams_text_tokens_and_one_finish(open_doors: Any) -> None:
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
        assert [chunk.HasField("summary") for chunk in chunks] == [False, False, True]
        assert chunks[-1].summary.usage.prompt_tokens == 2
        spec = doors.service.specs[0]
        assert (spec.prompt, spec.temperature, spec.seed, spec.timeout_s) == ((4, 5), 0.0, 2**64 - 1, None)


async def test_chat_passes_the_turns_on(open_doors: Any) -> None:
    async with open_doors() as doors:
        messages = [inference_pb2.ChatMessage(role="system", content=""), inference_pb2.ChatMessage(**MESSAGES[0])]

        chunks = [chunk async for chunk in doors.grpc.Chat(inference_pb2.ChatRequest(messages=messages))]

        assert chunks[-1].finish.reason == inference_pb2.FINISH_REASON_STOP
        assert doors.service.specs[0].prompt == (
            ChatTurn(role="system", content=""),
            ChatTurn(role="user", content="hi"),
        )


async def test_models_are_the_same_at_both_doors(open_doors: Any) -> None:
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
    open_doors: Any, request_: inference_pb2.GenerateRequest, names: str
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
            inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(role="developer")]),
            "messages.0.role must be one of system, user, assistant, tool",
        ),
        (
            inference_pb2.ChatRequest.FromString(b"\x12\x08\x0a\x04user\x18\x01"),
            "field number 3 of kvferry.v1.ChatMess",
        ),
    ],
)
async def test_a_wrong_chat_request_is_an_invalid_argument(
    open_doors: Any, request_: inference_pb2.ChatRequest, names: str
) -> None:
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
    open_doors: Any, error: BaseException, code: grpc.StatusCode, message: str
) -> None:
    async with open_doors(Script(pieces=["a"], error=error)) as doors:
        call = doors.grpc.Generate(inference_pb2.GenerateRequest(text="hi"))
        assert (await call.read()).text == "a"

        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()

        assert (raised.value.code(), raised.value.details()) == (code, message)


async def test_metadata_gives_the_clients_request_id_back(open_doors: Any) -> None:
    async with open_doors() as doors:
        call = doors.grpc.Generate(inference_pb2.GenerateRequest(text="hi"), metadata=(("x-request-id", "mine"),))
        chunk = await call.read()

        assert ("x-request-id", "mine") in [tuple(pair) for pair in await call.initial_metadata()]
        assert chunk.request_id != "mine"


async def test_an_eight_megabyte_prompt_passes_over_grpc(open_doors: Any) -> None:
    async with open_doors() as doors:
        doors.service._models = [DEFAULT_MODELS[0].__class__(name="scripted", context_length=2**31 - 1)]
        request = inference_pb2.GenerateRequest(text="x" * (8 * 1024**2))

        chunks = [chunk async for chunk in doors.grpc.Generate(request)]

        assert chunks[-1].summary.usage.prompt_tokens == 8 * 1024**2


async def test_reflection_lists_the_services(open_doors: Any) -> None:
    async with open_doors() as doors:
        stub = reflection_pb2_grpc.ServerReflectionStub(doors.channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))

        services = {service.name for service in (await call.read()).list_services_response.service}

        assert {"kvferry.v1.Inference", "grpc.health.v1.Health"} <= services
        call.cancel()
