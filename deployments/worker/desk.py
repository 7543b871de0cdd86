"""Where gateway messages, engine events and hand-offs of one worker meet.

It runs on the worker's event loop; the engine calls `on_output` there after every step. A request is known here from
its Submit or Prepare until its last event is sent and, for a prefill, until its hand-off has let the blocks go.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from deployments.worker.borrow import Lenders
from deployments.worker.entries import (
    DeskRules,
    Entry,
    Grammars,
    Outbox,
    WorkerIdentity,
    failed_message,
    work_done_message,
)
from deployments.worker.link import GatewaySession
from deployments.worker.prefix_desk import PrefixDesk
from deployments.worker.pull import Pull
from deployments.worker.submissions import Submissions
from deployments.worker.vitals import Vitals
from engine.events import (
    Accepted,
    Allocated,
    Borrowing,
    EngineEvent,
    Failed,
    Lent,
    Progress,
    StepOutput,
    WorkDone,
)
from engine.loop import EngineLoop
from engine.request import Part
from kv_store.handoff import HandoffTable
from messages.errors import DeadlineExceeded, Draining, InvalidRequest, ServingError, TransferError
from messages.handoff import BlockKey, Handoff
from messages.requests import RequestId
from messages.tokens import TokenEvent
from messages.v1 import worker_pb2 as pb
from messages.wire import (
    failed_to_wire,
    handoff_from_wire,
    handoff_to_wire,
    request_from_wire,
    request_id_of,
    tokens_to_wire,
)
from telemetry.metrics import WorkerCounter

log = logging.getLogger(__name__)

GATEWAY_MARGIN_S = 5.0
"""So much longer than its gateway a worker lets a request go on."""


class Desk:
    """Routes messages to the engine and events back; every request has exactly one terminal event or was aborted."""

    def __init__(
        self,
        identity: WorkerIdentity,
        engine: EngineLoop,
        handoffs: HandoffTable,
        peers: Lenders,
        grammars: Grammars,
        rules: DeskRules,
    ) -> None:
        self._identity = identity
        self._engine = engine
        self._handoffs = handoffs
        self._peers = peers
        self._clock = rules.clock
        self._on_load_failure = rules.on_load_failure
        self._prefixes = PrefixDesk(engine, handoffs, peers, rules, self)
        self.vitals = Vitals()
        self._submissions = Submissions(engine, grammars, self._prefixes, self.vitals, self.fail_if_here)
        self._entries: dict[RequestId, Entry] = {}
        self._sessions: set[GatewaySession] = set()
        self._endings: set[asyncio.Task[None]] = set()
        self.is_draining = False

    @property
    def num_requests(self) -> int:
        """Requests that are here in any state, and prefixes that are lent."""
        return len(self._entries) + self._prefixes.num_lent

    def count(self, counter: WorkerCounter, amount: float = 1.0) -> None:
        """Add to one of the worker's counters."""
        self.vitals.count(counter, amount)

    # Gateways

    def welcome(self) -> pb.Welcome:
        """Who this worker is."""
        identity = self._identity
        return pb.Welcome(
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            pool=identity.pool,
            role=identity.role,
            step_tokens=identity.step_tokens,
            chunk_tokens=identity.chunk_tokens,
        )

    def attach(self, session: GatewaySession) -> None:
        """A gateway has connected; tell it the load at once."""
        self._sessions.add(session)
        self._send_load(session)

    def detach(self, session: GatewaySession) -> None:
        """A gateway is gone: abort what it owned."""
        self._sessions.discard(session)
        for request_id in [r for r, entry in self._entries.items() if entry.session is session]:
            self._abort(request_id)

    def handle(self, session: GatewaySession, message: pb.GatewayMessage) -> None:
        """One message of a gateway; one that cannot be carried out ends its own request, not the session."""
        kind, request_id = message.WhichOneof("body"), request_id_of(message)
        try:
            self._carry_out(session, message)
        except ServingError as error:
            log.warning("message.refused kind=%s request_id=%s error=%s", kind, request_id, error)
            self.fail_if_here(request_id, error)
        except Exception as fault:
            # What it says may repeat a prompt, so only where it happened is told.
            place = ServingError(f"unexpected {type(fault).__name__}").with_traceback(fault.__traceback__)
            log.exception("message.failed kind=%s request_id=%s", kind, request_id, exc_info=place)
            self.fail_if_here(request_id, ServingError("the worker failed to carry a message out"))

    def _carry_out(self, session: GatewaySession, message: pb.GatewayMessage) -> None:
        match message.WhichOneof("body"):
            case "submit_unified":
                self._submit_unified(session, message.submit_unified)
            case "submit_prefill":
                self._submit_prefill(session, message.submit_prefill)
            case "prepare":
                self._prepare(session, message.prepare)
            case "progress":
                self._progress(message.progress)
            case "start":
                self._start(message.start)
            case "abort":
                self._abort(RequestId(message.abort.request_id))

    def send_load(self) -> None:
        """Heartbeat to every gateway."""
        for session in self._sessions:
            self._send_load(session)

    def _send_load(self, session: GatewaySession) -> None:
        message = self.vitals.message()
        if message is not None:
            message.handoffs, message.draining = len(self._handoffs), self.is_draining
            self._prefixes.add_rates(message)
            session.send(pb.WorkerMessage(load=message))

    def _enter(self, session: GatewaySession, request: pb.Request, part: Part) -> Entry | None:
        """Take a request in; None when it is here already, or was refused."""
        request_id = RequestId(request.request_id)
        if not session.is_new(request_id):
            return None
        error: ServingError | None = None
        # A hand-off carries on what was admitted before the drain.
        if self.is_draining and part is not Part.DECODE:
            error = Draining("the worker is about to stop", worker=self._identity.worker_id)
        elif request_id in self._entries:
            error = InvalidRequest("a request with this id is already here", request_id=request_id)
        if error is not None:
            session.send(failed_message(request_id, error))
            return None
        ends_s = self._clock() + request.timeout_s + GATEWAY_MARGIN_S if request.HasField("timeout_s") else None
        entry = self._entries[request_id] = Entry(session=session, part=part, ends_s=ends_s)
        return entry

    def _submit_unified(self, session: GatewaySession, message: pb.SubmitUnified) -> None:
        entry = self._enter(session, message.request, Part.WHOLE)
        if entry is not None:
            most = message.max_uncached_tokens if message.HasField("max_uncached_tokens") else None
            entry.offer, entry.max_uncached_tokens = self._prefixes.offer(message), most
            entry.reservation = message.reservation
            self._submissions.submit(request_from_wire(message.request), entry)

    def _submit_prefill(self, session: GatewaySession, message: pb.SubmitPrefill) -> None:
        entry = self._enter(session, message.request, Part.PREFILL)
        if entry is not None:
            entry.offer, entry.reservation = self._prefixes.offer(message), message.reservation
            self._submissions.submit(request_from_wire(message.request), entry)

    def _prepare(self, session: GatewaySession, message: pb.Prepare) -> None:
        entry = self._enter(session, message.request, Part.DECODE)
        if entry is None:
            return
        request = request_from_wire(message.request)
        handoff = handoff_from_wire(message.handoff)
        entry.reservation = message.reservation
        entry.pull = Pull(request.request_id, handoff, self._peers, self._engine, self.keep, self._on_load_failure)
        entry.pull_task = asyncio.create_task(entry.pull.run(), name=f"pull-{request.request_id}")
        entry.pull_task.add_done_callback(lambda task: self._on_pull_end(request.request_id, task))
        self._submissions.submit(request, entry)

    def fail_if_here(self, request_id: RequestId, error: ServingError) -> None:
        """End a request with an error from outside the engine; one that has already ended stays so."""
        entry = self._entries.get(request_id)
        if entry is None:
            return
        entry.session.send(failed_message(request_id, error))
        self._drop(request_id)

    def _progress(self, message: pb.PrefillProgress) -> None:
        entry = self._entries.get(RequestId(message.request_id))
        if entry is not None and entry.pull is not None:
            entry.pull.set_progress(message.complete_tokens)

    def _start(self, message: pb.Start) -> None:
        request_id = RequestId(message.request_id)
        entry = self._entries.get(request_id)
        if not message.first_tokens:
            raise InvalidRequest("a start without any token", request_id=request_id)
        # A copy of the message must not start it again.
        if entry is not None and entry.pull is not None and not entry.first_tokens:
            entry.pull.set_started()
            entry.first_tokens = {first.choice: first.token_id for first in message.first_tokens}
            if entry.compiling is None:
                self._engine.start_decode(request_id, entry.first_tokens)

    # Ends

    def _abort(self, request_id: RequestId) -> None:
        """Nobody waits for the request any more."""
        if request_id in self._entries:
            self.count(WorkerCounter.ABORTS)
            self._drop(request_id)

    def _drop(self, request_id: RequestId) -> None:
        entry = self._entries.pop(request_id)
        if entry.compiling is not None:
            entry.compiling.cancel()
        self._withdraw(entry)
        self._let_go(request_id, entry)

    def _withdraw(self, entry: Entry) -> None:
        if entry.handoff_id is not None:
            self._handoffs.withdraw(entry.handoff_id, self._clock())
            self.settle()

    def _let_go(self, request_id: RequestId, entry: Entry) -> None:
        """The engine forgets the request once nothing writes into its blocks any more."""
        tasks = entry.reads()
        if not tasks:
            self._engine.abort(request_id)
            return
        for task in (entry.pull_task, entry.borrow_task):
            if task is not None:
                task.cancel()
        self.keep(self._abort_after(request_id, tasks))

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what must come to its end although its request is gone."""
        ending = asyncio.create_task(work)
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def _abort_after(self, request_id: RequestId, tasks: list[asyncio.Task[None]]) -> None:
        await asyncio.wait(tasks)
        self._engine.abort(request_id)

    def _on_pull_end(self, request_id: RequestId, task: asyncio.Task[None]) -> None:
        entry = self._entries.get(request_id)
        if entry is None or entry.pull is None:
            return
        if task.cancelled():
            # Nobody has ended the request, which would wait for ever.
            self.fail_if_here(request_id, TransferError("reading the KV blocks was given up"))
            return
        stats = entry.pull.stats
        for counter, amount in stats.counters().items():
            self.count(counter, amount)
        self._prefixes.note_transfer(stats.size_bytes, stats.transfer_s)
        fault = task.exception()
        if fault is not None:
            error = fault if isinstance(fault, ServingError) else ServingError("reading the KV blocks failed")
            if error is not fault:
                log.error("pull.crashed request_id=%s", request_id, exc_info=fault)
            self.fail_if_here(request_id, error)

    # Prefixes of other workers, and for them

    async def lend(self, keys: Sequence[BlockKey], first_block: int) -> Handoff | None:
        """Offer what is cached of a prefix to another worker; a worker that drains lends none."""
        return None if self.is_draining else await self._prefixes.lend(keys, first_block)

    def settle(self) -> None:
        """Give back the blocks of hand-offs that are over, at once or as soon as token 1 is sent."""
        for request_id in self._handoffs.pop_freed():
            self._prefixes.note_end(request_id)
            entry = self._entries.get(request_id)
            if entry is None or entry.has_first:
                self._entries.pop(request_id, None)
                self._engine.abort(request_id)
            else:
                entry.is_released = True

    def expire(self) -> None:
        """Fence the hand-offs whose lease is over, end the requests whose time is."""
        now_s = self._clock()
        for request_id in [
            r for r, entry in self._entries.items() if entry.ends_s is not None and entry.ends_s < now_s
        ]:
            # A gateway ends its requests itself, unless it has been stopped, or cut off.
            self.fail_if_here(request_id, DeadlineExceeded("the request's time is over", request_id=request_id))
        expired = self._handoffs.expire(now_s)
        if expired:
            log.warning("lease.expired num=%d", len(expired))
            self.count(WorkerCounter.LEASES_EXPIRED, len(expired))
            self.settle()

    # Engine

    def on_output(self, output: StepOutput) -> None:
        """Everything one turn of the engine gave."""
        was_busy = self.vitals.is_busy
        self.vitals.take(output)
        outbox = Outbox()
        for event in output.events:
            if isinstance(event, Lent):
                self._prefixes.take(event)
                continue
            entry = self._entries.get(event.request_id)
            if entry is not None:
                self._deliver(entry, event, outbox)
        outbox.flush()
        if was_busy and not self.vitals.is_busy:
            self.send_load()

    def _deliver(self, entry: Entry, event: EngineEvent, outbox: Outbox) -> None:
        match event:
            case Accepted():
                outbox.add(entry.session, pb.Event(accepted=self._accepted(entry, event)))
            case Allocated():
                assert entry.pull is not None, "only a DECODE part is allocated for"
                entry.pull.set_destination(event.groups, event.cached_tokens)
                accepted = pb.Accepted(request_id=event.request_id, cached_tokens=event.cached_tokens)
                outbox.add(entry.session, pb.Event(accepted=accepted))
            case Borrowing():
                self._prefixes.borrow(entry, event)
            case Progress():
                progress = pb.PrefillProgress(request_id=event.request_id, complete_tokens=event.complete_tokens)
                outbox.add(entry.session, pb.Event(progress=progress))
            case WorkDone():
                entry.done = event
                outbox.add(entry.session, pb.Event(work_done=work_done_message(entry, event)))
            case TokenEvent():
                outbox.add(entry.session, pb.Event(tokens=tokens_to_wire(event)))
                self._after_tokens(entry, event)
            case Failed():
                outbox.add(entry.session, pb.Event(failed=failed_to_wire(event.request_id, event.error)))
                self._after_failure(entry, event.request_id)

    def _accepted(self, entry: Entry, event: Accepted) -> pb.Accepted:
        accepted = pb.Accepted(request_id=event.request_id, cached_tokens=event.cached_tokens)
        if event.groups is not None:
            num_tokens = event.num_given_tokens
            handoff = self._handoffs.grant(event.request_id, event.groups, num_tokens, self._clock())
            entry.handoff_id = handoff.handoff_id
            accepted.handoff.CopyFrom(handoff_to_wire(handoff))
        return accepted

    def _after_tokens(self, entry: Entry, event: TokenEvent) -> None:
        if entry.done is None:
            return
        if not entry.done.is_held:
            self._close_entry(event.request_id, entry)
            return
        entry.has_first = True
        if entry.is_released:
            del self._entries[event.request_id]
            self._engine.abort(event.request_id)

    def _after_failure(self, entry: Entry, request_id: RequestId) -> None:
        self._close_entry(request_id, entry)
        if not entry.reads():
            # A part whose token 1 was wrong is still there, because its blocks were being written.
            self._engine.abort(request_id)

    def _close_entry(self, request_id: RequestId, entry: Entry) -> None:
        """The request ended in the engine; a hand-off or a pull of it ends too."""
        del self._entries[request_id]
        self._withdraw(entry)
        if entry.reads():
            self._let_go(request_id, entry)
