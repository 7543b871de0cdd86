"""Fault points at the owner's end of hand-off calls: each call may come late, twice or never."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import grpc

from messages.faults import Faults
from messages.v1 import worker_pb2_grpc

PREFIX = "handoff."
_POINTS = {name: PREFIX + name.lower() for name in ("Open", "Heartbeat", "Close", "Release")}

Handler = Callable[[Any, "grpc.aio.ServicerContext[Any, Any]"], Awaitable[Any]]


class FaultyOwner:
    """A BlockOwner around another one: the four calls of a hand-off pass their points, all others go through.

    Args:
        inner: Answers the calls.
        faults: What is planned.
    """

    def __init__(self, inner: worker_pb2_grpc.BlockOwnerServicer, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        handler = getattr(self._inner, name)
        return self._passing(_POINTS[name], handler) if name in _POINTS else handler

    def _passing(self, point: str, handler: Handler) -> Handler:
        async def handle(request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> Any:
            fired = await self._faults.at(point)
            if fired.is_dropped:
                # The caller hears nothing and runs into its own deadline.
                await asyncio.sleep(context.time_remaining() or 0.0)
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "a fault was asked for here")
            answer = await handler(request, context)
            if fired.is_duplicated:
                await handler(request, context)
            return answer

        return handle


def with_faults(owner: worker_pb2_grpc.BlockOwnerServicer, faults: Faults) -> worker_pb2_grpc.BlockOwnerServicer:
    """Put the fault points around a servicer; it comes back as it is when none is planned."""
    return cast("worker_pb2_grpc.BlockOwnerServicer", FaultyOwner(owner, faults)) if faults.has(PREFIX) else owner
