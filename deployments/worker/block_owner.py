"""Both ends of the hand-off calls between workers: the owner's gRPC servicer and the reader's client."""

import asyncio
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import grpc

from kv_store.handoff import HandoffTable
from kv_store.handoff_close import DigestBlock, close_with_digests
from messages.errors import HandoffStale, HandoffUnknown, LayoutMismatch, PeerUnreachable, ServingError
from messages.handoff import BlockKey, BlockRef, CloseReply, Handoff, HandoffId, OpenReply
from messages.v1 import worker_pb2 as pb
from messages.v1 import worker_pb2_grpc
from messages.wire import (
    groups_from_wire,
    groups_to_wire,
    handoff_from_wire,
    handoff_to_wire,
    open_reply_from_wire,
)

CALL_TIMEOUT_S = 5.0
ERROR_CLASSES = {kind.__name__: kind for kind in (HandoffUnknown, HandoffStale, LayoutMismatch)}
"""Errors of an owner that travel in the details as `Class: message`."""


class OwnedMemory(Protocol):
    """What a reader must know about the owner's arena."""

    @property
    def agent_name(self) -> str:
        """Transport name of this life of the worker."""
        ...

    def metadata(self) -> bytes:
        """Transport metadata of the registered arena."""
        ...

    def expect_readers(self, num_readers: int) -> None:
        """So many peers are likely to read now."""
        ...


class BlockKeeper(Protocol):
    """Who holds the blocks that hand-offs are about."""

    def settle(self) -> None:
        """Give back the blocks of hand-offs that are over."""
        ...

    async def lend(self, keys: Sequence[BlockKey], first_block: int) -> Handoff | None:
        """Offer what is cached of a prefix, if it is more than `first_block` blocks."""
        ...


class BlockOwner(worker_pb2_grpc.BlockOwnerServicer):
    """Answers readers from the hand-off table."""

    def __init__(
        self,
        table: HandoffTable,
        memory: OwnedMemory,
        group_offsets: tuple[int, ...],
        clock: Callable[[], float],
        keeper: BlockKeeper,
        digest: DigestBlock | None = None,
    ) -> None:
        self._table = table
        self._memory = memory
        self._group_offsets = group_offsets
        self._clock = clock
        self._keeper = keeper
        self._digest = digest

    async def Describe(self, request: pb.DescribeRequest, context: object) -> pb.DescribeResponse:  # noqa: N802
        """How to reach this worker's memory."""
        return pb.DescribeResponse(
            worker_id=self._table.worker_id,
            incarnation=self._table.incarnation,
            agent_name=self._memory.agent_name,
            agent_metadata=self._memory.metadata(),
        )

    async def Lend(self, request: pb.LendRequest, context: object) -> pb.LendResponse:  # noqa: N802
        """Offer what is cached of a prefix; nothing to a reader that means another life or another layout."""
        is_meant = request.incarnation == self._table.incarnation and request.fingerprint == self._table.fingerprint
        keys = [BlockKey(key) for key in request.keys]
        handoff = await self._keeper.lend(keys, request.first_block) if is_meant else None
        return pb.LendResponse() if handoff is None else pb.LendResponse(handoff=handoff_to_wire(handoff))

    async def Open(  # noqa: N802
        self, request: pb.OpenRequest, context: grpc.aio.ServicerContext[pb.OpenRequest, pb.OpenResponse]
    ) -> pb.OpenResponse:
        """Check, pin, answer with a generation."""
        try:
            generation = self._table.open(
                HandoffId(request.handoff_id),
                attempt_id=request.attempt_id,
                incarnation=request.incarnation,
                fingerprint=request.fingerprint,
                groups=groups_from_wire(request.groups),
                now_s=self._clock(),
            )
        except ServingError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{type(error).__name__}: {error}")
            raise
        self._memory.expect_readers(len(self._table))
        return pb.OpenResponse(
            generation=generation,
            agent_name=self._memory.agent_name,
            agent_metadata=self._memory.metadata(),
            group_offsets=self._group_offsets,
            lease_s=self._table.lease_s,
        )

    async def Heartbeat(self, request: pb.HandoffRef, context: object) -> pb.HandoffStatus:  # noqa: N802
        """Extend the lease."""
        valid = self._table.heartbeat(
            HandoffId(request.handoff_id), request.incarnation, request.generation, self._clock()
        )
        return pb.HandoffStatus(valid=valid)

    async def Close(self, request: pb.HandoffRef, context: object) -> pb.CloseResponse:  # noqa: N802
        """Say whether what was read is valid, with its digests, and let the blocks go."""
        reply = await close_with_digests(
            self._table,
            HandoffId(request.handoff_id),
            request.incarnation,
            request.generation,
            clock=self._clock,
            digest=self._digest,
        )
        self._memory.expect_readers(len(self._table))
        self._keeper.settle()
        return pb.CloseResponse(valid=reply.is_valid, digests=reply.digests)

    async def Release(self, request: pb.ReleaseRequest, context: object) -> pb.HandoffStatus:  # noqa: N802
        """The reader needs nothing more."""
        valid = self._table.release(HandoffId(request.handoff_id), request.incarnation, self._clock())
        self._memory.expect_readers(len(self._table))
        self._keeper.settle()
        return pb.HandoffStatus(valid=valid)


class RemoteOwner:
    """A HandoffOwner on another worker, called over gRPC."""

    def __init__(self, channel: grpc.aio.Channel, reader_id: str, fingerprint: str) -> None:
        self._stub = worker_pb2_grpc.BlockOwnerStub(channel)
        self._reader_id = reader_id
        self._fingerprint = fingerprint

    async def describe(self) -> pb.DescribeResponse:
        """How to reach the owner's memory."""
        with _translate():
            return await self._stub.Describe(pb.DescribeRequest(), timeout=CALL_TIMEOUT_S)

    async def lend(self, incarnation: str, keys: Sequence[BlockKey], first_block: int) -> Handoff | None:
        """Ask for a prefix; None: it holds nothing beyond the first `first_block` blocks, or lends too much.

        Raises:
            PeerUnreachable: The owner does not answer.
        """
        request = pb.LendRequest(
            incarnation=incarnation, fingerprint=self._fingerprint, keys=keys, first_block=first_block
        )
        with _translate():
            response = await self._stub.Lend(request, timeout=CALL_TIMEOUT_S)
        return handoff_from_wire(response.handoff) if response.HasField("handoff") else None

    async def open(self, handoff: Handoff, groups: tuple[tuple[BlockRef | None, ...], ...]) -> OpenReply:
        """Pin `groups` at the owner.

        Raises:
            HandoffUnknown: The owner holds no such hand-off.
            HandoffStale: Incarnation, block id or key differ.
            LayoutMismatch: The owner lays KV out differently.
            PeerUnreachable: The owner does not answer.
        """
        request = pb.OpenRequest(
            handoff_id=handoff.handoff_id,
            attempt_id=f"{self._reader_id}/{uuid.uuid4().hex}",
            incarnation=handoff.incarnation,
            fingerprint=self._fingerprint,
            groups=groups_to_wire(groups),
        )
        with _translate():
            return open_reply_from_wire(await self._stub.Open(request, timeout=CALL_TIMEOUT_S))

    async def heartbeat(self, handoff: Handoff, generation: int) -> bool:
        """Extend the lease; False when it is over."""
        with _translate():
            return (await self._stub.Heartbeat(_ref(handoff, generation), timeout=CALL_TIMEOUT_S)).valid

    async def close(self, handoff: Handoff, generation: int) -> CloseReply:
        """End the read: is everything read under `generation` valid, and which digests do its blocks have."""
        with _translate():
            reply = await self._stub.Close(_ref(handoff, generation), timeout=CALL_TIMEOUT_S)
        return CloseReply(is_valid=reply.valid, digests=tuple(reply.digests))

    async def release(self, handoff: Handoff, reason: str) -> None:
        """Tell the owner that nothing (more) is needed."""
        request = pb.ReleaseRequest(handoff_id=handoff.handoff_id, incarnation=handoff.incarnation, reason=reason)
        with _translate():
            await self._stub.Release(request, timeout=CALL_TIMEOUT_S)


def _ref(handoff: Handoff, generation: int) -> pb.HandoffRef:
    return pb.HandoffRef(handoff_id=handoff.handoff_id, incarnation=handoff.incarnation, generation=generation)


@contextmanager
def _translate() -> Iterator[None]:
    """GRPC faults of a peer become hand-off or transfer errors."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        details = error.details() or ""
        name, _, text = details.partition(": ")
        if name in ERROR_CLASSES:
            raise ERROR_CLASSES[name](text) from error
        raise PeerUnreachable("the owner of the blocks does not answer", status=error.code().name) from error
    except grpc.aio.UsageError as error:
        raise PeerUnreachable("the owner of the blocks was forgotten before a call") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # A channel that is closed cancels its calls, whoever waits for them.
        raise PeerUnreachable("the owner of the blocks was forgotten during a call") from error
