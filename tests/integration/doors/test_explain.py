"""Explanations at both doors on real sockets: the same answer, the same refusals, and nothing runs."""

from dataclasses import asdict
from typing import Any

import grpc
import pytest

from deployments.gateway.scripted_service import Script
from deployments.service import ChatTurn
from kvferry import AsyncClient, InvalidRequest, NotFound
from kvferry.v1 import inference_pb2
from messages.errors import Overloaded, Unavailable

LONG: Any = [{"role": "user", "content": "x" * 2000}]


async def test_http_and_the_sdk_tell_the_same_and_nothing_runs(open_doors: Any) -> None:
    async with open_doors() as doors:
        answer = await doors.http.post("/explain", json={"model": "scripted", "messages": LONG, "max_tokens": 7})
        async with AsyncClient(f"127.0.0.1:{doors.listeners.grpc_port}") as client:
            explanation = await client.explain_chat(LONG, model="scripted", max_tokens=7)

        found = asdict(explanation)
        for stage in ("decode", "prefill"):
            found[stage]["candidates"] = list(found[stage]["candidates"])
        assert answer.status_code == 200
        assert answer.json() == found
        assert doors.service.specs == []
        over_http, over_grpc = doors.service.explained
        assert over_http.prompt == over_grpc.prompt == (ChatTurn(role="user", content="x" * 2000),)
        assert over_http.max_tokens == over_grpc.max_tokens == 7


async def test_a_long_prompt_goes_to_the_idle_workers_and_its_cost_is_the_sum_of_its_parts(open_doors: Any) -> None:
    async with open_doors() as doors, AsyncClient(f"127.0.0.1:{doors.listeners.grpc_port}") as client:
        explanation = await client.explain("x" * 2000)

    assert (explanation.prompt_tokens, explanation.reason) == (2000, "sooner_there")
    assert (explanation.decode_worker, explanation.prefill_worker) == ("decode-2", "prefill-1")
    assert explanation.local_ms is not None
    assert explanation.remote_ms is not None
    assert explanation.prefill is not None
    for stage in (explanation.decode, explanation.prefill):
        assert [each.rank for each in stage.candidates] == [0, 1, None, None]
        assert stage.candidates[0].cost == pytest.approx(sum(stage.candidates[0].parts.values()))


async def test_a_short_prompt_is_compared_with_no_prefill_worker(open_doors: Any) -> None:
    async with open_doors() as doors, AsyncClient(f"127.0.0.1:{doors.listeners.grpc_port}") as client:
        explanation = await client.explain([1, 2, 3])

    assert (explanation.reason, explanation.prefill_worker, explanation.prefill) == ("few_tokens", None, None)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"messages": LONG, "stream": True}, 400, "stream"),
        ({"messages": LONG, "user": "bob"}, 400, "user"),
        ({"messages": []}, 400, "messages"),
        ({"messages": LONG, "max_tokens": 10**6}, 400, "max_tokens"),
        ({"messages": LONG, "model": "other"}, 404, "model"),
    ],
)
async def test_http_refuses_what_a_chat_would_be_refused_for(
    open_doors: Any, body: dict[str, Any], status: int, param: str
) -> None:
    async with open_doors() as doors:
        answer = await doors.http.post("/explain", json=body)

        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
        assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_http_refuses_a_body_that_is_too_large_or_no_json_and_another_method(open_doors: Any) -> None:
    async with open_doors() as doors:
        large = await doors.http.post("/explain", content=b" " * (16 * 1024**2 + 1))
        broken = await doors.http.post("/explain", content=b"{")
        read = await doors.http.get("/explain")

        assert (large.status_code, broken.status_code, read.status_code) == (413, 400, 405)
        assert broken.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("error", "status", "code", "message"),
    [
        (Unavailable("no worker", retry_after_s=3), 503, grpc.StatusCode.UNAVAILABLE, "no worker"),
        (Overloaded("full", retry_after_s=3), 429, grpc.StatusCode.RESOURCE_EXHAUSTED, "full"),
        (ZeroDivisionError("secret"), 500, grpc.StatusCode.INTERNAL, "internal error"),
    ],
)
async def test_an_error_has_its_status_at_both_doors(
    open_doors: Any, error: BaseException, status: int, code: grpc.StatusCode, message: str
) -> None:
    request = inference_pb2.ExplainRequest(generate=inference_pb2.GenerateRequest(text="hi"))

    async with open_doors(Script(pieces=[], error=error)) as doors:
        answer = await doors.http.post("/explain", json={"messages": LONG})
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await doors.grpc.Explain(request)

        assert (answer.status_code, answer.json()["error"]["message"]) == (status, message)
        assert answer.headers.get("retry-after") == ("3" if status in (429, 503) else None)
        assert (raised.value.code(), raised.value.details()) == (code, message)


async def test_grpc_names_what_is_wrong_with_the_request(open_doors: Any) -> None:
    async with open_doors() as doors, AsyncClient(f"127.0.0.1:{doors.listeners.grpc_port}") as client:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await doors.grpc.Explain(inference_pb2.ExplainRequest())
        with pytest.raises(InvalidRequest, match="temperature must be in"):
            await client.explain("hi", temperature=3.0)
        with pytest.raises(NotFound):
            await client.explain("hi", model="other")

        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "generate or chat" in (raised.value.details() or "")


async def test_the_clients_request_id_is_given_back(open_doors: Any) -> None:
    request = inference_pb2.ExplainRequest(generate=inference_pb2.GenerateRequest(text="hi"))

    async with open_doors() as doors:
        call = doors.grpc.Explain(request, metadata=(("x-request-id", "mine"),))
        await call
        answer = await doors.http.post("/explain", json={"messages": LONG}, headers={"x-request-id": "mine"})

        assert ("x-request-id", "mine") in [tuple(pair) for pair in await call.initial_metadata()]
        assert answer.headers["x-request-id"] == "mine"


async def test_a_client_that_leaves_ends_its_question(open_doors: Any) -> None:
    request = inference_pb2.ExplainRequest(generate=inference_pb2.GenerateRequest(text="hi"))

    async with open_doors(Script(pieces=[], hang=True)) as doors:
        call = doors.grpc.Explain(request)
        await doors.until_running(1)
        call.cancel()

        await doors.until_running(0)
