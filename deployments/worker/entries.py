"""What a desk knows of one request, and the events of one turn on their way to the gateways."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from deployments.config_kv import LoadFailurePolicy
from deployments.worker.borrow import Borrow, BorrowLimits
from deployments.worker.link import GatewaySession
from deployments.worker.pull import Pull
from deployments.worker.rates import RateMeter
from engine.batch import Matcher
from engine.events import WorkDone
from engine.request import Part
from messages.errors import ServingError
from messages.handoff import HandoffId
from messages.requests import Grammar, RequestId
from messages.reuse import ReuseOffer
from messages.v1 import worker_pb2 as pb
from messages.wire import failed_to_wire


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """Who a worker is in one life."""

    worker_id: str
    incarnation: str
    pool: str
    role: str
    step_tokens: int = 512
    """Most tokens of one step."""
    chunk_tokens: int = 512
    """Most prompt tokens of one request in one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeskRules:
    """How a desk treats its requests."""

    clock: Callable[[], float] = time.monotonic
    """Of the leases that this worker grants, in seconds."""
    on_load_failure: LoadFailurePolicy = "recompute"
    """What follows when the blocks of a hand-off did not arrive whole."""
    reuse: "ReuseRules | None" = None
    """How prefixes move between workers; None: not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseRules:
    """How a worker lends and borrows."""

    max_lends: int
    """Most prefixes to lend at a time."""
    borrowing: BorrowLimits
    rates: RateMeter
    """What gateways decide by."""


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
    ends_s: float | None = None
    """Clock of the desk; None: no deadline."""
    compiling: asyncio.Task[None] | None = None
    """The request waits for its grammar; the engine does not know it yet."""
    first_tokens: dict[int, int] = field(default_factory=dict)
    """DECODE: token 1 of each choice that goes on, once known."""
    pull: Pull | None = None
    pull_task: asyncio.Task[None] | None = None
    max_uncached_tokens: int | None = None
    """WHOLE: refuse when more prompt tokens than this would be computed here; None: no limit."""
    offer: ReuseOffer | None = None
    """Who may lend a prefix; never with DECODE."""
    borrow: Borrow | None = None
    borrow_task: asyncio.Task[None] | None = None
    reservation: pb.Reservation | None = None
    """Under which number gateways hold the request's load until a heartbeat counts it."""
    handoff_id: HandoffId | None = None
    done: WorkDone | None = None
    """The next token event is the last one."""
    has_first: bool = False
    """PREFILL: token 1 is sent; only the hand-off keeps the blocks."""
    is_released: bool = False
    """PREFILL: no reader needs the blocks; they go as soon as token 1 is sent."""

    def reads(self) -> list[asyncio.Task[None]]:
        """What may still write into the request's blocks."""
        settling = self.pull.settling if self.pull is not None else None
        tasks = (self.pull_task, settling, self.borrow_task)
        return [task for task in tasks if task is not None and not task.done()]


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
    if entry.borrow is not None:
        borrowed = entry.borrow.stats
        message.blocks_moved, message.bytes_moved = borrowed.blocks, borrowed.size_bytes
        message.transfer_s = borrowed.transfer_s
        message.reused_tokens = borrowed.tokens
        message.reused_from.extend(borrowed.workers)
    return message


def failed_message(request_id: RequestId, error: ServingError) -> pb.WorkerMessage:
    """The terminal event of a request that ends outside the engine."""
    failed = pb.Event(failed=failed_to_wire(request_id, error))
    return pb.WorkerMessage(step=pb.StepEvents(events=[failed]))
