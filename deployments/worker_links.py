"""The gateway's end of the worker links: one stream per live worker, every request multiplexed on it."""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal

import grpc

from kv_store.registry.protocol import Registry, WorkerRecord
from messages.errors import Overloaded, RegistryError, ServingError, WorkerLost
from messages.requests import RequestId
from messages.v1 import worker_pb2 as pb
from messages.v1 import worker_pb2_grpc
from telemetry.metrics import GroupGauge, WorkerSample

log = logging.getLogger(__name__)

POLL_PERIOD_S = 0.5
SPEAKING_S = 1.0
"""A worker whose last word, heartbeats included, is younger speaks."""
GRPC_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.max_send_message_length", 64 * 2**20),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # A worker whose host vanished answers no ping.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
)

Source = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Incoming:
    """One event of one worker for one request."""

    source: Source
    event: pb.Event | ServingError


class Exchange:
    """A request's conversation with the workers it uses; leaving it in any way aborts what still runs."""

    def __init__(self, request_id: RequestId, max_buffered: int) -> None:
        self.request_id = request_id
        self._incoming: asyncio.Queue[Incoming] = asyncio.Queue(max_buffered)
        self._links: dict[Source, WorkerLink] = {}
        self._open: set[Source] = set()
        self._overflow: ServingError | None = None

    def join(self, source: Source, link: "WorkerLink") -> None:
        """Receive the events of `link` about this request as `source`."""
        self._links[source] = link
        self._open.add(source)
        link.attach(self, source)

    def worker_id(self, source: Source) -> str:
        """Who plays `source`."""
        return self._links[source].record.worker_id

    def send(self, source: Source, message: pb.GatewayMessage) -> None:
        """Send to the worker that plays `source`."""
        self._links[source].send(message)

    def deliver(self, incoming: Incoming) -> None:
        """Queue an event; a request that does not take its events in time fails, alone."""
        try:
            self._incoming.put_nowait(incoming)
        except asyncio.QueueFull:
            self._overflow = Overloaded("the client takes its tokens too slowly", request_id=self.request_id)

    async def next(self) -> Incoming:
        """The next event of any worker.

        Raises:
            Overloaded: Events came faster than they were taken for too long.
        """
        if self._overflow is not None:
            raise self._overflow
        return await self._incoming.get()

    def finish(self, source: Source) -> None:
        """The worker has nothing left to do for this request; it needs no abort."""
        self._open.discard(source)
        self._links[source].detach(self.request_id)

    def abandon(self, reason: str) -> None:
        """Abort wherever the request still is."""
        for source in list(self._open):
            message = pb.GatewayMessage(abort=pb.Abort(request_id=self.request_id, reason=reason))
            self._links[source].send(message)
            self.finish(source)


@dataclass(eq=False)
class WorkerLink:
    """One stream to one life of one worker."""

    record: WorkerRecord
    gateway_id: str
    silence_s: float
    """A worker that says nothing for so long, heartbeats included, is lost."""
    welcome: pb.Welcome | None = None
    """What the worker has said of itself when the stream came up."""
    load: pb.Load | None = None
    is_up: bool = False
    unlisted_s: float | None = None
    """When the worker was first missing in the table; None: its lease runs."""
    heard_s: float = -math.inf
    """When it last said something."""
    _outgoing: asyncio.Queue[pb.GatewayMessage | None] = field(default_factory=asyncio.Queue)
    _exchanges: dict[RequestId, tuple[Exchange, Source]] = field(default_factory=dict)

    def attach(self, exchange: Exchange, source: Source) -> None:
        """Route events about the exchange's request to it."""
        self._exchanges[exchange.request_id] = (exchange, source)

    def detach(self, request_id: RequestId) -> None:
        """Drop later events about the request."""
        self._exchanges.pop(request_id, None)

    def send(self, message: pb.GatewayMessage) -> None:
        """Queue a message; lost when the stream breaks, which every exchange hears of."""
        self._outgoing.put_nowait(message)

    async def run(self) -> None:
        """Keep a stream open until cancelled; a break is told to every exchange."""
        async with grpc.aio.insecure_channel(self.record.address, options=GRPC_OPTIONS) as channel:
            while True:
                try:
                    await self._stream(worker_pb2_grpc.WorkerLinkStub(channel))
                except grpc.aio.AioRpcError as error:
                    log.info("worker.link_lost worker_id=%s code=%s", self.record.worker_id, error.code())
                except TimeoutError:
                    log.warning("worker.silent worker_id=%s seconds=%s", self.record.worker_id, self.silence_s)
                finally:
                    self._lose()
                await asyncio.sleep(POLL_PERIOD_S)

    async def _stream(self, stub: "worker_pb2_grpc.WorkerLinkAsyncStub") -> None:
        self._outgoing = asyncio.Queue()
        loop = asyncio.get_running_loop()
        call = stub.Connect(self._messages(self._outgoing))
        try:
            # A stopped process keeps its sockets open: only its silence tells.
            async with asyncio.timeout(self.silence_s) as limit:
                async for message in call:
                    limit.reschedule(loop.time() + self.silence_s)
                    self.heard_s = time.monotonic()
                    if not self._take(message):
                        return
        finally:
            # Otherwise the call goes on waiting for messages, and is found so by the garbage collector.
            self._outgoing.put_nowait(None)
            call.cancel()

    def _take(self, message: pb.WorkerMessage) -> bool:
        """Take in what the worker says; False when it is not the one that was called."""
        match message.WhichOneof("body"):
            case "welcome":
                if message.welcome.incarnation != self.record.incarnation:
                    # Another life listens on the address; the table will say so soon.
                    return False
                self.is_up, self.welcome = True, message.welcome
            case "load":
                self.load = message.load
            case "step":
                for event in message.step.events:
                    self._route(event)
        return True

    async def _messages(self, outgoing: asyncio.Queue[pb.GatewayMessage | None]) -> AsyncIterator[pb.GatewayMessage]:
        yield pb.GatewayMessage(hello=pb.Hello(gateway_id=self.gateway_id))
        while (message := await outgoing.get()) is not None:
            yield message

    def _route(self, event: pb.Event) -> None:
        kind = event.WhichOneof("body")
        if kind is None:
            return
        found = self._exchanges.get(RequestId(getattr(event, kind).request_id))
        if found is not None:
            exchange, source = found
            exchange.deliver(Incoming(source, event))

    def _lose(self) -> None:
        self.is_up = False
        exchanges, self._exchanges = self._exchanges, {}
        for exchange, source in exchanges.values():
            lost = WorkerLost("the worker was lost while it held the request", worker=self.record.worker_id)
            exchange.deliver(Incoming(source, lost))


class WorkerLinks:
    """Follows the worker table; a worker takes traffic while its lease runs and its stream is up."""

    def __init__(self, registry: Registry, silence_s: float = 6.0, grace_s: float = 0.0) -> None:
        """Prepare; `watch` does the following.

        Args:
            registry: Has the worker table.
            silence_s: A worker that says nothing for so long is lost.
            grace_s: A worker that is missing in the table takes work for so long while its stream is up.
        """
        self._registry = registry
        self._silence_s = silence_s
        self._grace_s = grace_s
        self._gateway_id = uuid.uuid4().hex
        self._links: dict[tuple[str, str], tuple[WorkerLink, asyncio.Task[None]]] = {}

    async def watch(self) -> None:
        """Follow the table until cancelled, then end every stream."""
        try:
            while True:
                try:
                    records = await self._registry.workers()
                except RegistryError as error:
                    # Nothing is known, so nothing changes: the streams say who is alive.
                    log.warning("registry.unreachable error=%s", error)
                else:
                    await self._follow(records)
                await asyncio.sleep(POLL_PERIOD_S)
        finally:
            for _, task in self._links.values():
                task.cancel()
            await asyncio.gather(*(task for _, task in self._links.values()), return_exceptions=True)

    def live(self) -> list[WorkerLink]:
        """Workers that take new requests.

        One that is missing in the table and still speaks is among them for a while: a registry that has lost everything
        is filled again within a lease, and a worker that drains says so itself.
        """
        now_s = time.monotonic()
        return [
            link
            for link, _ in self._links.values()
            if link.is_up
            and (link.unlisted_s is None or self._is_spared(link, link.unlisted_s, now_s))
            and link.load is not None
            and not link.load.draining
        ]

    def _is_spared(self, link: WorkerLink, unlisted_s: float, now_s: float) -> bool:
        return now_s - unlisted_s < self._grace_s and now_s - link.heard_s < SPEAKING_S

    def samples(self) -> list[WorkerSample]:
        """Newest heartbeats, for the metrics page."""
        return [_sample(link.record, link.load) for link, _ in self._links.values() if link.is_up and link.load]

    async def _follow(self, records: list[WorkerRecord]) -> None:
        wanted = {(record.worker_id, record.incarnation): record for record in records}
        replaced = {record.worker_id for record in records}
        for key in [key for key in self._links if key not in wanted]:
            link, task = self._links[key]
            if link.unlisted_s is None or key[0] in replaced:
                link.unlisted_s = -math.inf if key[0] in replaced else time.monotonic()
            # A worker that drains has left the table and still streams.
            if not link.is_up:
                del self._links[key]
                task.cancel()
        for key, record in wanted.items():
            if key in self._links:
                self._links[key][0].unlisted_s = None
            else:
                link = WorkerLink(record, self._gateway_id, self._silence_s)
                self._links[key] = (link, asyncio.create_task(link.run(), name=f"link-{record.worker_id}"))


def _sample(record: WorkerRecord, load: pb.Load) -> WorkerSample:
    return WorkerSample(
        worker_id=record.worker_id,
        pool=record.pool,
        role=record.role,
        groups=tuple(
            GroupGauge(
                name=group.name,
                total=group.total_blocks,
                free=group.free_blocks,
                cached=group.cached_blocks,
                referenced=group.referenced_blocks,
            )
            for group in load.groups
        ),
        running=load.running,
        waiting=load.waiting,
        handoffs=load.handoffs,
        queued_prefill_tokens=load.queued_prefill_tokens,
        counters=dict(load.counters),
    )
