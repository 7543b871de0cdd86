"""The gRPC door: kvferry.v1.Inference, standard health and reflection on one server.

A call that is cancelled or out of time ends its request at once; the call's deadline is the request's.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from deployments.gateway.exchange import open_chunks
from deployments.gateway.explanation_answers import explanation_message
from deployments.gateway.grpc_types import (
    chunk_message,
    models_message,
    refuse_unknown_fields,
    spec_of_chat,
    spec_of_explain,
    spec_of_generate,
)
from deployments.gateway.status_codes import details, grpc_status, translate_unexpected
from deployments.service import GenerationService, GenerationSpec
from kvferry.v1 import inference_pb2, inference_pb2_grpc
from messages.errors import ServingError

MAX_MESSAGE_BYTES = 32 * 1024**2
HEALTH_POLL_S = 0.5
SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
REQUEST_ID_KEY = "x-request-id"

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # With it, a second server would take the port silently and share its calls.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)

Context = grpc.aio.ServicerContext[Any, Any]


def make_grpc_server(service: GenerationService) -> grpc.aio.Server:
    """Return the server with all its services, not bound to a port and not started."""
    server = grpc.aio.server(options=_OPTIONS)
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceDoor(service), server)
    health_pb2_grpc.add_HealthServicer_to_server(HealthDoor(service), server)
    reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return server


class InferenceDoor(inference_pb2_grpc.InferenceServicer):
    """kvferry.v1.Inference over a GenerationService.

    The methods write their chunks instead of yielding them: gRPC leaves a cancelled generator to the garbage
    collector, but it cancels a coroutine where it stands.
    """

    def __init__(self, service: GenerationService) -> None:
        self._service = service

    async def Generate(  # type: ignore[override]  # noqa: N802 - the contract's name; the stub knows generators only
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        """Continue a prompt."""
        await self._answer(context, lambda timeout_s: spec_of_generate(request, timeout_s))

    async def Chat(  # type: ignore[override]  # noqa: N802 - the contract's name; the stub knows generators only
        self, request: inference_pb2.ChatRequest, context: Context
    ) -> None:
        """Answer a conversation."""
        await self._answer(context, lambda timeout_s: spec_of_chat(request, timeout_s))

    async def Models(  # noqa: N802 - the contract's name
        self, request: inference_pb2.ModelsRequest, context: Context
    ) -> inference_pb2.ModelsResponse:
        """List the models."""
        await _echo_request_id(context)
        try:
            with translate_unexpected():
                refuse_unknown_fields(request)
                return models_message(self._service.models())
        except ServingError as error:
            return await context.abort(grpc_status(error), details(error))

    async def Explain(  # noqa: N802 - the contract's name
        self, request: inference_pb2.ExplainRequest, context: Context
    ) -> inference_pb2.Explanation:
        """Say where a request would run."""
        await _echo_request_id(context)
        try:
            with translate_unexpected():
                spec = spec_of_explain(request, context.time_remaining())
                return explanation_message(await self._service.explain(spec))
        except ServingError as error:
            return await context.abort(grpc_status(error), details(error))

    async def _answer(self, context: Context, make_spec: Callable[[float | None], GenerationSpec]) -> None:
        await _echo_request_id(context)
        try:
            with translate_unexpected():
                spec = make_spec(context.time_remaining())
            async with open_chunks(self._service, spec) as chunks:
                async for chunk in chunks:
                    await context.write(chunk_message(chunk))
        except ServingError as error:
            await context.abort(grpc_status(error), details(error))


class HealthDoor(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpc_health has no types
    """grpc.health.v1, asked of the service each time, so that it cannot be out of date."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service

    async def Check(self, request: Any, context: Context) -> Any:  # noqa: N802 - untyped contract
        """Answer SERVING or NOT_SERVING now."""
        status = self._status(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service[:256]!r} here")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: Context) -> None:  # noqa: N802 - untyped contract
        """Send the status now and at every change, until the client leaves."""
        last = None
        while True:
            status = self._status(request.service)
            if status is None:
                status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if status != last:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last = status
            await asyncio.sleep(HEALTH_POLL_S)

    def _status(self, service_name: str) -> Any:
        if service_name not in ("", SERVICE_NAME):
            return None
        response = health_pb2.HealthCheckResponse
        return response.SERVING if self._service.is_ready() else response.NOT_SERVING


async def _echo_request_id(context: Context) -> None:
    """Give the client's own x-request-id back; it names nothing inside."""
    given = [(key, value) for key, value in context.invocation_metadata() or () if key == REQUEST_ID_KEY]
    await context.send_initial_metadata(given[:1])
