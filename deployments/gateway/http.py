"""The HTTP door: the OpenAI chat API, explanations, health and metrics.

An error before the first chunk is an HTTP status; after it, an `error` event that ends the stream without [DONE].
A client that goes away, streaming or not, ends its request at once.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.gateway.exchange import open_chunks
from deployments.gateway.explanation_answers import explanation_object
from deployments.gateway.openai_answers import ChatAnswer, make_answer, model_object
from deployments.gateway.openai_types import ChatRequest, parse_chat_request, parse_explain_request
from deployments.gateway.status_codes import (
    error_body,
    http_headers,
    http_status,
    openai_error,
    translate_unexpected,
)
from deployments.service import Chunk, GenerationService
from messages.errors import Draining, ModelNotFound, ServingError

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 1024**2
MAX_REQUEST_ID_BYTES = 256
_EVENT_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


def make_http_app(service: GenerationService, metrics_registry: CollectorRegistry, cut: asyncio.Event) -> ASGIApp:
    """Return the ASGI application of the HTTP door; `cut` ends the answers that still run, with an error."""
    pages = _Pages(service, metrics_registry)
    routes = [
        Route("/v1/chat/completions", ChatEndpoint(service, cut), methods=["POST"]),
        Route("/explain", pages.explain, methods=["POST"]),
        Route("/v1/models", pages.models, methods=["GET"]),
        Route("/v1/models/{name:path}", pages.model, methods=["GET"]),
        Route("/health", pages.health, methods=["GET"]),
        Route("/ready", pages.ready, methods=["GET"]),
        Route("/metrics", pages.metrics, methods=["GET"]),
    ]
    handlers: dict[Any, Any] = {ServingError: _on_serving_error, HTTPException: _on_http_error, Exception: _on_crash}
    return _EchoRequestId(Starlette(routes=routes, exception_handlers=handlers))


class ChatEndpoint:
    """POST /v1/chat/completions as an ASGI application, because it must hear of a disconnect while it answers."""

    def __init__(self, service: GenerationService, cut: asyncio.Event) -> None:
        self._service = service
        self._cut = cut

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            body = await _read_body(Request(scope, receive))
        except ClientDisconnect:
            return
        chat, reply = parse_chat_request(body), _Reply(send)
        work = self._answer(chat, scope, receive, reply)
        interruption = await _unless(work, disconnect=_disconnected(receive), cut=self._cut.wait())
        if interruption == "disconnect":
            log.info("request.abandoned")
        elif interruption == "cut":
            error = Draining("the server is stopping; send the request again")
            if not reply.is_started:
                raise error
            await reply(_error_part(error))

    async def _answer(self, chat: ChatRequest, scope: Scope, receive: Receive, send: Send) -> None:
        model = chat.spec.model or next((card.name for card in self._service.models()), "")
        async with open_chunks(self._service, chat.spec) as chunks:
            if chat.stream:
                await _stream(chunks, chat, model, send)
                return
            received = [chunk async for chunk in chunks]
        completion = _answer_to(chat, received[0], model).completion(received)
        await JSONResponse(completion)(scope, receive, send)


class _Reply:
    """An ASGI `send` that knows whether the status line is out."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_started = False

    async def __call__(self, message: Message) -> None:
        self.is_started = True
        await self._send(message)


class _Pages:
    """Everything that answers at once."""

    def __init__(self, service: GenerationService, metrics_registry: CollectorRegistry) -> None:
        self._service = service
        self._metrics_registry = metrics_registry
        self._created = int(time.time())

    async def explain(self, request: Request) -> Response:
        try:
            body = await _read_body(request)
        except ClientDisconnect:
            # Nobody hears it.
            return Response(status_code=499)
        with translate_unexpected():
            explanation = await self._service.explain(parse_explain_request(body))
            return JSONResponse(explanation_object(explanation))

    async def models(self, request: Request) -> Response:
        cards = [model_object(card, created=self._created) for card in self._service.models()]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        for card in self._service.models():
            if card.name == name:
                return JSONResponse(model_object(card, created=self._created))
        raise ModelNotFound(f"the model {name!r} is not served here", param="model")

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        if self._service.is_ready():
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready"}, status_code=503, headers={"retry-after": "1"})

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._metrics_registry), media_type=CONTENT_TYPE_LATEST)


async def _read_body(request: Request) -> bytes:
    too_large = HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced[:20]) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise too_large
    return bytes(body)


async def _unless(work: Coroutine[Any, Any, None], **interruptions: Coroutine[Any, Any, object]) -> str | None:
    """Run `work` to its end, or cancel it and wait for it when an interruption comes first; return which one."""
    answer = asyncio.create_task(work)
    names = {asyncio.create_task(interruption): name for name, interruption in interruptions.items()}
    try:
        await asyncio.wait((answer, *names), return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            await answer
            return None
        return next(name for task, name in names.items() if task.done())
    finally:
        for task in (answer, *names):
            task.cancel()
        await asyncio.gather(answer, *names, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _answer_to(chat: ChatRequest, first: Chunk, model: str) -> ChatAnswer:
    spec = chat.spec
    return make_answer(first.request_id, model, num_choices=spec.n, has_logprobs=spec.logprobs is not None)


async def _stream(chunks: AsyncIterator[Chunk], chat: ChatRequest, model: str, send: Send) -> None:
    # The first chunk before the status line: until then an error can still be a status.
    first = await anext(chunks)
    answer = _answer_to(chat, first, model)
    await send({"type": "http.response.start", "status": 200, "headers": _raw(_EVENT_STREAM_HEADERS)})
    roles = [_with_usage(role, include_usage=chat.include_usage) for role in answer.roles()]
    await send(_part(b"".join(map(_event, roles)) + _events(first, answer, include_usage=chat.include_usage)))
    try:
        async for chunk in chunks:
            events = _events(chunk, answer, include_usage=chat.include_usage)
            if events:
                await send(_part(events))
    except ServingError as error:
        await send(_error_part(error))
    else:
        await send(_part(b"data: [DONE]\n\n", is_last=True))


def _events(chunk: Chunk, answer: ChatAnswer, *, include_usage: bool) -> bytes:
    parts = [_with_usage(part, include_usage=include_usage) for part in answer.parts(chunk)]
    if include_usage and chunk.summary is not None:
        parts.append(answer.usage_chunk(chunk.summary.usage))
    return b"".join(map(_event, parts))


def _with_usage(chunk: dict[str, Any], *, include_usage: bool) -> dict[str, Any]:
    return chunk | {"usage": None} if include_usage else chunk


def _event(data: dict[str, Any], *, name: str | None = None) -> bytes:
    # ASCII only, because some clients take U+2028 and its like for the end of a line.
    line = f"data: {json.dumps(data, separators=(',', ':'))}\n\n"
    return (line if name is None else f"event: {name}\n{line}").encode()


def _part(body: bytes, *, is_last: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": not is_last}


def _error_part(error: ServingError) -> Message:
    return _part(_event(openai_error(error), name="error"), is_last=True)


def _raw(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]


async def _on_serving_error(request: Request, error: ServingError) -> Response:
    return JSONResponse(openai_error(error), status_code=http_status(error), headers=http_headers(error))


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    body = error_body(error.detail, kind="invalid_request_error")
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _on_crash(request: Request, error: Exception) -> Response:
    return JSONResponse(error_body("internal error", kind="server_error", code="serving_error"), status_code=500)


class _EchoRequestId:
    """Gives the client's own x-request-id back; it names nothing inside."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"x-request-id", b"")
        is_plain = all(0x20 <= byte < 0x7F for byte in given) and len(given) <= MAX_REQUEST_ID_BYTES

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start" and given and is_plain:
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", given)]
            await send(message)

        await self._app(scope, receive, send_with_id)
