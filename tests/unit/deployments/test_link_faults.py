from collections.abc import AsyncIterator
from typing import cast

import grpc
import pytest

from deployments.worker.link import GatewaySession, WorkerLink
from messages.fault_plan import parse_faults
from messages.faults import Faults
from messages.v1 import worker_pb2 as pb

Context = grpc.aio.ServicerContext[pb.GatewayMessage, pb.WorkerMessage]


class EchoDesk:
    """Answers each message with an event of one step that carries its request's id."""

    def __init__(self) -> None:
        self.handled: list[str] = []

    def welcome(self) -> pb.Welcome:
        return pb.Welcome(worker_id="w")

    def attach(self, session: GatewaySession) -> None:
        session.send(pb.WorkerMessage(load=pb.Load()))

    def handle(self, session: GatewaySession, message: pb.GatewayMessage) -> None:
        request_id = message.abort.request_id
        self.handled.append(request_id)
        event = pb.Event(failed=pb.Failed(request_id=request_id))
        session.send(pb.WorkerMessage(step=pb.StepEvents(events=[event])))

    def detach(self, session: GatewaySession) -> None: ...


async def talk(plan: str, *request_ids: str) -> tuple[list[str], list[str]]:
    """What the desk and the gateway hear."""

    async def messages() -> AsyncIterator[pb.GatewayMessage]:
        yield pb.GatewayMessage(hello=pb.Hello(gateway_id="g"))
        for request_id in request_ids:
            yield pb.GatewayMessage(abort=pb.Abort(request_id=request_id))

    desk = EchoDesk()
    link = WorkerLink(desk, Faults(parse_faults(plan)))
    heard: list[str] = []
    async for message in link.Connect(messages(), cast("Context", None)):
        kind = message.WhichOneof("body")
        heard.append(message.step.events[0].failed.request_id if kind == "step" else str(kind))
    return desk.handled, heard


@pytest.mark.parametrize(
    ("plan", "handled", "heard"),
    [
        ("", "abc", "abc"),
        ("worker.message:drop*1+1", "ac", "ac"),
        ("worker.message:duplicate*1", "aabc", "aabc"),
        ("worker.event:drop*1", "abc", "bc"),
        ("worker.event:duplicate*1+2", "abc", "abcc"),
    ],
)
async def test_messages_and_events_are_lost_or_doubled_as_planned(plan: str, handled: str, heard: str) -> None:
    """Rule 26; the greeting and heartbeats are no events."""
    at_desk, at_gateway = await talk(plan, *"abc")

    assert at_desk == list(handled)
    assert at_gateway == ["welcome", "load", *heard]
