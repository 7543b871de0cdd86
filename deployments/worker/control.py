"""What an operator may ask of one worker: both ends of the calls."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

import grpc

from messages.errors import PeerUnreachable
from messages.v1 import worker_pb2 as pb
from messages.v1 import worker_pb2_grpc

CALL_TIMEOUT_S = 10.0


class WorkerControl(worker_pb2_grpc.WorkerControlServicer):
    """Answers operators."""

    def __init__(self, incarnation: str, clear_cache: Callable[[], Future[int]]) -> None:
        self._incarnation = incarnation
        self._clear_cache = clear_cache

    async def ClearCache(  # noqa: N802
        self,
        request: pb.ClearCacheRequest,
        context: grpc.aio.ServicerContext[pb.ClearCacheRequest, pb.ClearCacheResponse],
    ) -> pb.ClearCacheResponse:
        """Forget every cached block that no request uses."""
        if request.incarnation != self._incarnation:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another life of the worker listens here")
        return pb.ClearCacheResponse(blocks_cleared=await asyncio.wrap_future(self._clear_cache()))


async def clear_cache(address: str, incarnation: str) -> int:
    """Make a worker forget every cached block that no request uses.

    Returns:
        Blocks forgotten, over all KV groups.

    Raises:
        PeerUnreachable: It does not answer, or another life of it does.
    """
    async with grpc.aio.insecure_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerControlStub(channel)
        try:
            reply = await stub.ClearCache(pb.ClearCacheRequest(incarnation=incarnation), timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise PeerUnreachable("the worker does not answer", address=address, status=error.code().name) from error
    return int(reply.blocks_cleared)
