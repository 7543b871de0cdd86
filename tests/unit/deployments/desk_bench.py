"""A worker's desk with a real step loop, hand-off table and gateway session; the model samples without computing."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Self

from deployments.worker.desk import Desk
from deployments.worker.entries import DeskRules, WorkerIdentity
from deployments.worker.link import GatewaySession
from engine.admission import SchedulerLimits
from engine.batch import Batch, Matcher, RowResult, Sampled
from engine.events import StepOutput
from engine.loop import EngineLoop
from engine.scheduler import Scheduler
from kv_store.block_key import KeyExtras
from kv_store.handoff import HandoffTable
from kv_store.handoff_reader import HandoffReader, LocalGroups
from kv_store.layout import BlockLayout, KvGroup
from kv_store.local_cache import BlockCopy, LocalCache
from messages.errors import InvalidRequest, LayoutMismatch
from messages.handoff import BlockKey, Handoff, HandoffId
from messages.requests import GenerationRequest, Grammar, RequestId, SamplingParams
from messages.v1 import worker_pb2 as pb
from messages.wire import request_to_wire
from telemetry.metrics import WorkerCounter

BLOCK = 4
NUM_BLOCKS = 32
WAIT_S = 5.0


class CountingModel:
    """Samples the context length; a step begins when it may."""

    def __init__(self) -> None:
        self.may_run = threading.Event()
        self.may_run.set()

    def run(self, batch: Batch) -> list[RowResult]:
        assert self.may_run.wait(WAIT_S)
        return [RowResult(samples=(Sampled(token_ids=(row.end,)),) if row.sampling else ()) for row in batch.rows]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        assert not copies


class PlainIdentity:
    def extras(self, request: GenerationRequest) -> KeyExtras:
        return KeyExtras(model="m", block_size=BLOCK, codec="raw", adapter=request.adapter, salt=request.salt)


class NoGrammars:
    async def compile(self, grammar: Grammar) -> Matcher:
        raise InvalidRequest("no grammar is known here", param="grammar")


class Refusing:
    """Other workers whose hand-offs never fit; remembers what it told them."""

    def __init__(self) -> None:
        self.released: list[tuple[HandoffId, str]] = []
        self.asked: list[tuple[str, str, str]] = []

    def owner(self, worker_id: str, incarnation: str, address: str) -> "Refusing":
        self.asked.append((worker_id, incarnation, address))
        return self

    async def release(self, handoff: Handoff, reason: str) -> None:
        self.released.append((handoff.handoff_id, reason))

    async def lend(self, incarnation: str, keys: Sequence[BlockKey], first_block: int) -> Handoff | None:
        return None

    def make_reader(self, handoff: Handoff, groups: LocalGroups) -> HandoffReader:
        raise LayoutMismatch("the owner lays KV out differently", handoff_id=handoff.handoff_id)


class DeskBench:
    """Async context manager; `heard` are the events that the gateway got."""

    def __init__(self) -> None:
        group = KvGroup(name="full", layers=(0,), num_kv_heads=1, k_dim=2, v_dim=2)
        cache = LocalCache(BlockLayout(groups=(group,), block_size=BLOCK, model_digest="m"), (NUM_BLOCKS,))
        scheduler = Scheduler(cache, SchedulerLimits(block_size=BLOCK, context_length=100))
        self.model = CountingModel()
        self.engine = EngineLoop(scheduler, cache, self.model, PlainIdentity(), self._sink)
        self.table = HandoffTable(worker_id="w", incarnation="life", address="a:1", fingerprint="f", lease_s=30.0)
        self.peers = Refusing()
        identity = WorkerIdentity(worker_id="w", incarnation="life", pool="p", role="unified")
        self.now_s = 0.0
        rules = DeskRules(clock=lambda: self.now_s)
        self.desk = Desk(identity, self.engine, self.table, self.peers, NoGrammars(), rules)
        self.session = GatewaySession()
        self.heard: list[pb.Event] = []
        self.load = pb.Load()
        """The newest heartbeat."""

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self.desk.attach(self.session)
        self._reading = asyncio.create_task(self._read())
        self.engine.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await asyncio.to_thread(self.engine.close)

    def prefill(self, name: str, num_tokens: int = 8, max_tokens: int = 3) -> None:
        submit = pb.SubmitPrefill(request=request(name, num_tokens, max_tokens))
        self.desk.handle(self.session, pb.GatewayMessage(submit_prefill=submit))

    def release(self, handoff: Handoff) -> None:
        """What the reader asks for."""
        assert self.table.release(handoff.handoff_id, handoff.incarnation, self.now_s)
        self.desk.settle()

    def abort(self, name: str) -> None:
        self.desk.handle(self.session, pb.GatewayMessage(abort=pb.Abort(request_id=name)))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 - the condition is not an event
                await asyncio.sleep(0.002)

    async def until_heard(self, kind: str, name: str) -> pb.Event:
        def found() -> list[pb.Event]:
            return [event for event in self.heard if _is_about(event, kind, name)]

        await self.until(lambda: bool(found()))
        return found()[0]

    async def until_idle(self) -> None:
        """Until the engine has given every block back."""
        await self.until(self._is_idle)

    async def count(self, counter: WorkerCounter) -> float:
        """A counter, as the next heartbeat has it."""
        self.load = pb.Load()
        self.desk.send_load()
        await self.until(lambda: bool(self.load.groups))
        return self.load.counters[counter]

    def _is_idle(self) -> bool:
        self.desk.send_load()
        groups = [(group.referenced_blocks, group.free_blocks + group.cached_blocks) for group in self.load.groups]
        return groups == [(0, NUM_BLOCKS)]

    def _sink(self, output: StepOutput) -> None:
        self._loop.call_soon_threadsafe(self.desk.on_output, output)

    async def _read(self) -> None:
        async for message in self.session.messages():
            self.heard.extend(message.step.events)
            if message.WhichOneof("body") == "load":
                self.load = message.load


def request(name: str, num_tokens: int = 8, max_tokens: int = 3) -> pb.Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    tokens = tuple(range(20, 20 + num_tokens))
    wanted = GenerationRequest(request_id=RequestId(name), model="m", prompt_token_ids=tokens, sampling=sampling)
    return request_to_wire(wanted)


def _is_about(event: pb.Event, kind: str, name: str) -> bool:
    body = event.WhichOneof("body")
    return body == kind and getattr(event, kind).request_id == name
