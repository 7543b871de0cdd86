"""The worker's end of the gateway link: one stream per gateway, all its requests multiplexed on it.

When a gateway's stream ends, for whatever reason, every request that came over it is aborted.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Protocol, TypeVar

import grpc

from messages.faults import NO_FAULTS, Faults
from messages.requests import RequestId
from messages.v1 import worker_pb2 as pb
from messages.v1 import worker_pb2_grpc

log = logging.getLogger(__name__)

Message = TypeVar("Message")

MAX_REMEMBERED_REQUESTS = 16_384
MAX_QUEUED_MESSAGES = 4096
"""A gateway that is so far behind is treated as gone."""


class GatewaySession:
    """One connected gateway: its outgoing queue and the requests it owns."""

    def __init__(self) -> None:
        self.gateway_id = ""
        self._outgoing: asyncio.Queue[pb.WorkerMessage | None] = asyncio.Queue(MAX_QUEUED_MESSAGES)
        self._is_behind = False
        self._known: dict[RequestId, None] = {}

    def is_new(self, request_id: RequestId) -> bool:
        """Whether the gateway has not sent this request before, remembered for a while; it is known from now on.

        A gateway gives an id to one attempt only, so the second message with it is a copy, however late it comes.
        """
        if request_id in self._known:
            return False
        self._known[request_id] = None
        if len(self._known) > MAX_REMEMBERED_REQUESTS:
            del self._known[next(iter(self._known))]
        return True

    def send(self, message: pb.WorkerMessage) -> None:
        """Queue a message; a full queue ends the session."""
        try:
            self._outgoing.put_nowait(message)
        except asyncio.QueueFull:
            self._is_behind = True

    async def messages(self) -> AsyncIterator[pb.WorkerMessage]:
        """Outgoing messages until the session ends."""
        while not self._is_behind:
            message = await self._outgoing.get()
            if message is None:
                return
            yield message
        log.warning("gateway.dropped gateway_id=%s reason=behind", self.gateway_id)

    def end(self) -> None:
        """No more messages after those that are queued."""
        try:
            self._outgoing.put_nowait(None)
        except asyncio.QueueFull:
            self._is_behind = True


class RequestDesk(Protocol):
    """Where messages of gateways go."""

    def welcome(self) -> pb.Welcome:
        """Who this worker is."""
        ...

    def attach(self, session: GatewaySession) -> None:
        """A gateway has connected."""
        ...

    def handle(self, session: GatewaySession, message: pb.GatewayMessage) -> None:
        """One message of a gateway."""
        ...

    def detach(self, session: GatewaySession) -> None:
        """A gateway is gone: abort what it owned."""
        ...


class WorkerLink(worker_pb2_grpc.WorkerLinkServicer):
    """gRPC servicer that connects gateways to the desk."""

    def __init__(self, desk: RequestDesk, faults: Faults = NO_FAULTS) -> None:
        self._desk = desk
        self._faults = faults

    async def Connect(  # noqa: N802 - the name is the contract's
        self,
        request_iterator: AsyncIterator[pb.GatewayMessage],
        context: grpc.aio.ServicerContext[pb.GatewayMessage, pb.WorkerMessage],
    ) -> AsyncIterator[pb.WorkerMessage]:
        """Serve one gateway until its stream ends."""
        session = GatewaySession()
        session.send(pb.WorkerMessage(welcome=self._desk.welcome()))
        self._desk.attach(session)
        reader = asyncio.create_task(self._read(session, request_iterator), name="gateway-link-reader")
        try:
            async for message in session.messages():
                for copy in await self._copies(
                    "worker.event", message, is_counted=message.WhichOneof("body") == "step"
                ):
                    yield copy
        finally:
            reader.cancel()
            self._desk.detach(session)

    async def _read(self, session: GatewaySession, messages: AsyncIterator[pb.GatewayMessage]) -> None:
        try:
            async for message in messages:
                if message.WhichOneof("body") == "hello":
                    session.gateway_id = message.hello.gateway_id
                    continue
                for copy in await self._copies("worker.message", message):
                    self._desk.handle(session, copy)
        finally:
            session.end()

    async def _copies(self, point: str, message: Message, *, is_counted: bool = True) -> Sequence[Message]:
        """The message as often as it is to come: once, unless a fault is planned."""
        if not self._faults.is_set or not is_counted:
            return (message,)
        fired = await self._faults.at(point)
        return (message,) * (0 if fired.is_dropped else 2 if fired.is_duplicated else 1)
