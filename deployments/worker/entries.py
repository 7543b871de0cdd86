"""What a desk knows of one request, and the events of one turn on their way to the gateways."""

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Protocol

from deployments.worker.link import GatewaySession
from deployments.worker.pull import Pull
from engine.batch import Matcher
from engine.events import WorkDone
from engine.request import Part
from messages.handoff import HandoffId
from messages.requests import Grammar
from messages.v1 import worker_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """Who a worker is in one life."""

    worker_id: str
    incarnation: str
    pool: str
    role: str


class Grammars(Protocol):
    """Compiles what outputs must match."""

    async def compile(self, grammar: Grammar) -> Matcher:
        """A matcher at the grammar's start.

        Raises:
            InvalidRequest: The grammar is wrong or too large.
            Overloaded: Too many grammars wait to be compiled.
        """
        ...


@dataclass(slots=True, kw_only=True)
class Entry:
    """One request on this worker."""

    session: GatewaySession
    part: Part
    compiling: asyncio.Task[None] | None = None
    """The request waits for its grammar; the engine does not know it yet."""
    first_tokens: dict[int, int] = field(default_factory=dict)
    """DECODE: token 1 of each choice that goes on, once known."""
    pull: Pull | None = None
    pull_task: asyncio.Task[None] | None = None
    handoff_id: HandoffId | None = None
    done: WorkDone | None = None
    """The next token event is the last one."""
    has_first: bool = False
    """PREFILL: token 1 is sent; only the hand-off keeps the blocks."""
    is_released: bool = False
    """PREFILL: no reader needs the blocks; they go as soon as token 1 is sent."""


@dataclass(slots=True)
class Outbox:
    """Events of one turn, by gateway."""

    by_session: dict[GatewaySession, list[pb.Event]] = field(default_factory=lambda: defaultdict(list))

    def add(self, session: GatewaySession, event: pb.Event) -> None:
        """Queue one event."""
        self.by_session[session].append(event)

    def flush(self) -> None:
        """One StepEvents message per gateway."""
        for session, events in self.by_session.items():
            session.send(pb.WorkerMessage(step=pb.StepEvents(events=events)))


def work_done_message(entry: Entry, event: WorkDone) -> pb.WorkDone:
    """What the gateway hears of a request's cost here."""
    message = pb.WorkDone(
        request_id=event.request_id,
        computed_prompt_tokens=event.computed_prompt_tokens,
        queue_s=event.queue_s,
        prefill_s=event.prefill_s,
    )
    if entry.pull is not None:
        stats = entry.pull.stats
        message.blocks_moved, message.bytes_moved = stats.blocks, stats.size_bytes
        message.transfer_s, message.exposed_s = stats.transfer_s, stats.exposed_s
    return message
