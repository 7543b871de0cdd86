"""Health at both doors, ports, and stopping."""

import asyncio
import socket
import time
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry, Counter

from deployments.gateway.listeners import Listeners
from deployments.gateway.scripted_service import Script, ScriptedService
from kvferry.v1 import inference_pb2
from messages.errors import ConfigError

MESSAGES: Any = [{"role": "user", "content": "hi"}]
CHAT = {"model": "scripted", "messages": MESSAGES}


HELLO = Script(pieces=["a"])


async def test_health_follows_the_service_at_both_doors(open_doors: Any) -> None:
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


async def test_health_of_an_unknown_service_is_not_found(open_doors: Any) -> None:
    async with open_doors() as doors:
        stub = health_pb2_grpc.HealthStub(doors.channel)

        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Check(health_pb2.HealthCheckRequest(service="other"))

        assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def test_metrics_are_those_of_the_registry(open_doors: Any) -> None:
    async with open_doors() as doors:
        Counter("kvferry_things", "Things.", registry=doors.registry).inc(3)

        response = await doors.http.get("/metrics")

        assert "kvferry_things_total 3.0" in response.text
        assert response.headers["content-type"].startswith("text/plain; version=")


@pytest.mark.parametrize(("taken", "option"), [("grpc", "--grpc-port"), ("http", "--http-port")])
async def test_a_port_in_use_is_named_and_nothing_is_started(open_doors: Any, taken: str, option: str) -> None:
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


async def test_ports_are_free_again_after_the_stop(open_doors: Any) -> None:
    async with open_doors() as doors:
        await doors.http.get("/health")
        ports = doors.listeners.grpc_port, doors.listeners.http_port

    async with Listeners(ScriptedService(HELLO), "127.0.0.1", *ports, CollectorRegistry()) as again:
        assert (again.grpc_port, again.http_port) == ports


async def test_running_requests_end_well_within_the_drain(open_doors: Any) -> None:
    async with open_doors(Script(pieces=["a"] * 5, delay_s=0.1)) as doors:
        over_http = asyncio.create_task(doors.http.post("/v1/chat/completions", json=CHAT | {"stream": True}))
        call = doors.grpc.Generate(inference_pb2.GenerateRequest(text="hi"))
        await doors.until_running(2)

        await doors.listeners.stop(5.0)

        assert (await over_http).text.endswith("data: [DONE]\n\n")
        assert [chunk.HasField("finish") async for chunk in call][-1]


async def test_a_body_that_never_ends_does_not_hold_the_stop_up(open_doors: Any) -> None:
    async with open_doors() as doors:
        _, writer = await asyncio.open_connection("127.0.0.1", doors.listeners.http_port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        await doors.http.get("/health")

        async with asyncio.timeout(5):
            await doors.listeners.stop(0.0)

        writer.close()


async def test_requests_that_outlast_the_drain_are_cut_and_closed(open_doors: Any) -> None:
    async with open_doors(Script(pieces=["a"], hang=True)) as doors:
        streamed = asyncio.create_task(doors.http.post("/v1/chat/completions", json=CHAT | {"stream": True}))
        whole = asyncio.create_task(doors.http.post("/v1/chat/completions", json=CHAT))
        call = doors.grpc.Generate(inference_pb2.GenerateRequest(text="hi"))
        await doors.until_running(3)
        started = time.monotonic()

        await doors.listeners.stop(0.5)

        assert time.monotonic() - started < 3
        assert doors.service.num_running == 0
        assert "event: error" in (await streamed).text.strip().split("\n\n")[-1]
        assert "[DONE]" not in (await streamed).text
        assert ((await whole).status_code, (await whole).json()["error"]["code"]) == (503, "draining")
        with pytest.raises(grpc.aio.AioRpcError):
            _ = [chunk async for chunk in call]
