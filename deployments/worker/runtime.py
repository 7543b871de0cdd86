"""One worker, whole, without Serve: engine, hand-offs, gateway link, transport and its place in the registry."""

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc

from deployments.config import AppConfig, PoolConfig
from deployments.worker import owner_faults
from deployments.worker.block_owner import BlockOwner
from deployments.worker.borrow import BorrowLimits
from deployments.worker.control import WorkerControl
from deployments.worker.desk import Desk
from deployments.worker.entries import DeskRules, ReuseRules, WorkerIdentity
from deployments.worker.link import WorkerLink
from deployments.worker.membership import Membership, MembershipTimes
from deployments.worker.model_host import ModelHost
from deployments.worker.peers import PeerLimits, Peers, peer_agent_name
from deployments.worker.rates import RateMeter
from engine.events import StepOutput
from engine.grammar import GrammarCompiler
from kv_store import registry_faults
from kv_store.handoff import HandoffTable
from kv_store.handoff_close import DigestBlock
from kv_store.registry.protocol import Registry, WorkerRecord
from kv_store.registry.shard import ShardFailure
from kv_store.transfer import faulty
from kv_store.transfer.bounded import BoundedTransport
from kv_store.transfer.digest import BlockDigester
from kv_store.transfer.protocol import BlockTransport
from messages.errors import ServingError
from messages.faults import NO_FAULTS, Faults
from messages.v1 import worker_pb2_grpc
from telemetry.metrics import WorkerCounter, WorkerGauge
from telemetry.step_record import StepLog, StepRecord

log = logging.getLogger(__name__)

HEARTBEAT_PERIOD_S = 0.2
EXPIRY_PERIOD_S = 0.25
GRPC_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.max_send_message_length", 64 * 2**20),
    # A used port must be an error, not a second listener.
    ("grpc.so_reuseport", 0),
)


class RegistryCounts:
    """What a worker's registry saw, told by its hooks."""

    def __init__(self) -> None:
        self.failures = 0
        """Commands that a shard did not carry out."""
        self.stale = 0
        """Claims of lives that have ended which this worker removed."""

    def add_failure(self, failure: ShardFailure) -> None:
        """Note commands that were lost."""
        self.failures += failure.num_commands

    def add_stale(self, by: str, num_claims: int) -> None:
        """Note claims that the sweep removed; those that a lookup ignored are still there."""
        self.stale += num_claims if by == "sweep" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """What a worker is made of; the runtime closes transport, registry and grammars."""

    model: ModelHost
    transport: BlockTransport
    registry: Registry
    grammars: GrammarCompiler
    registry_counts: RegistryCounts = field(default_factory=RegistryCounts)
    faults: Faults = NO_FAULTS


class WorkerRuntime:
    """Async context manager: inside it the worker takes work, after it everything is given back.

    Args:
        config: The whole deployment.
        pool: The worker's own.
        worker_id: The same in every life of the worker.
        host: Address to listen on, and to be reached at.
        parts: What it is made of; closed with it.
        port: Port of its internal gRPC server; 0: any that is free.
    """

    def __init__(
        self, config: AppConfig, pool: PoolConfig, worker_id: str, host: str, parts: WorkerParts, port: int = 0
    ) -> None:
        self._config = config
        self._pool = pool
        self._host = host
        self._port = port
        self._parts = parts
        self._worker_id = worker_id
        self._incarnation = incarnation_of(parts.transport.agent_name)
        self._clock = parts.faults.skewed(time.monotonic)
        self._registry = registry_faults.with_faults(parts.registry, parts.faults)
        self._tasks: list[asyncio.Task[None]] = []
        self._fault: BaseException | None = None
        self.address = ""

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        model = self._parts.model
        self._server = grpc.aio.server(options=GRPC_OPTIONS)
        port = self._server.add_insecure_port(f"{self._host}:{self._port}")
        self.address = f"{self._host}:{port}"
        self._step_log = _open_step_log(self._config.step_log_dir, self._worker_id)
        self._digest = _digester(model) if self._config.handoff.digest else None
        self._rates = RateMeter(model.layout)
        self._engine = model.make_engine(self._sink, self._note_step, self._parts.faults)
        self._handoffs = HandoffTable(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            address=self.address,
            fingerprint=model.layout.fingerprint,
            lease_s=self._config.handoff.lease_s,
        )
        handoff = self._config.handoff
        reads = faulty.with_faults(self._parts.transport, model.arena.buffer, self._parts.faults)
        self._peers = Peers(
            self._worker_id,
            self._registry,
            BoundedTransport(reads, handoff.max_peers),
            model.arena,
            PeerLimits(
                read_deadline_s=handoff.read_deadline_s,
                max_peers=handoff.max_peers,
                grace_s=self._config.registry.lease_s,
            ),
            self._digest,
        )
        identity = WorkerIdentity(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            pool=self._pool.name,
            role=self._pool.role,
            step_tokens=model.limits.max_step_tokens,
            chunk_tokens=model.limits.max_chunk_tokens,
        )
        rules = DeskRules(clock=self._clock, on_load_failure=handoff.on_load_failure, reuse=self._reuse_rules())
        self.desk = Desk(identity, self._engine, self._handoffs, self._peers, self._parts.grammars, rules)
        times = MembershipTimes(lease_s=self._config.registry.lease_s, entry_ttl_s=self._config.registry.entry_ttl_s)
        self._membership = Membership(self._registry, self._record(model), times)
        await self._serve(model)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._membership.leave()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.stop(grace=0.5)
        await asyncio.to_thread(self._engine.close)
        await self._peers.close()
        await asyncio.to_thread(self._parts.transport.close)
        await self._parts.grammars.close()
        await self._parts.registry.close()
        if self._step_log is not None:
            self._step_log.close()

    async def drain(self, timeout_s: float) -> None:
        """Take no new work and wait until the requests that are here have ended."""
        self.desk.is_draining = True
        self.desk.send_load()
        await self._membership.leave()
        deadline_s = time.monotonic() + timeout_s
        while self.desk.num_requests and time.monotonic() < deadline_s:  # noqa: ASYNC110 - once per life of a worker
            await asyncio.sleep(0.05)

    def check(self) -> None:
        """Say whether this worker is fit to go on.

        Raises:
            ServingError: A part of it has stopped.
        """
        if not self._engine.is_alive:
            raise ServingError("the engine's step thread has stopped")
        if self._fault is not None:
            raise ServingError("a task of the worker has stopped", cause=repr(self._fault)[:200])

    def describe(self) -> dict[str, str]:
        """Who and where this worker is."""
        return {"worker_id": self._worker_id, "incarnation": self._incarnation, "address": self.address}

    async def _serve(self, model: ModelHost) -> None:
        owner = BlockOwner(
            self._handoffs,
            self._parts.transport,
            tuple(model.arena.group_offset(group) for group in range(len(model.layout.groups))),
            self._clock,
            self.desk,
            self._digest,
        )
        control = WorkerControl(self._incarnation, self._engine.clear_cache)
        worker_pb2_grpc.add_WorkerControlServicer_to_server(control, self._server)
        faults = self._parts.faults
        if faults.is_set:
            log.warning("faults.planned plan=%s", faults)
        worker_pb2_grpc.add_BlockOwnerServicer_to_server(owner_faults.with_faults(owner, faults), self._server)
        worker_pb2_grpc.add_WorkerLinkServicer_to_server(WorkerLink(self.desk, faults), self._server)
        self._engine.start()
        await self._server.start()
        self._spawn(self._membership.renew())
        self._spawn(self._membership.publish())
        self._spawn(self._membership.tend())
        self._spawn(self._peers.watch())
        self._spawn(self._heartbeat())
        self._spawn(self._expire())

    def _record(self, model: ModelHost) -> WorkerRecord:
        return WorkerRecord(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            address=self.address,
            pool=self._pool.name,
            role=self._pool.role,
            model=self._config.model.name,
            fingerprint=model.layout.fingerprint,
            block_size=model.layout.block_size,
            key_model=model.loaded.digest,
            key_codec=model.codec,
            context_length=model.context_length,
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._on_task_end)
        self._tasks.append(task)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._fault = task.exception()
            log.error("task.died error=%r", self._fault, exc_info=self._fault)

    async def _heartbeat(self) -> None:
        while True:
            if not self._engine.is_alive:
                # Silence tells the gateways.
                raise ServingError("the engine's step thread has stopped")
            self._count_registry()
            self.desk.vitals.set_count(WorkerCounter.LEASES_GRANTED, self._handoffs.num_granted)
            self.desk.vitals.set_count(WorkerCounter.LEASES_EXTENDED, self._handoffs.num_extended)
            self.desk.vitals.set_count(WorkerCounter.LATE_MESSAGES, self._handoffs.num_late)
            self.desk.send_load()
            await asyncio.sleep(HEARTBEAT_PERIOD_S)

    def _count_registry(self) -> None:
        counts = self._membership.counts
        for name, value in (
            (WorkerCounter.REGISTRY_ERRORS, self._parts.registry_counts.failures),
            (WorkerCounter.REGISTRY_STALE_DROPPED, self._parts.registry_counts.stale),
            (WorkerCounter.REGISTRY_RESYNCS, counts.resyncs),
            (WorkerCounter.REGISTRY_GAPS, counts.gaps),
            (WorkerCounter.REGISTRY_EPOCH_CHANGES, counts.epoch_changes),
            (WorkerGauge.REGISTRY_DEGRADED, float(self._registry.num_silent > 0)),
            (WorkerGauge.PUBLISH_QUEUE_DEPTH, self._membership.queue_depth),
        ):
            self.desk.vitals.set_count(name, value)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_PERIOD_S)
            self.desk.expire()
            self._parts.transport.expect_readers(len(self._handoffs))

    def _reuse_rules(self) -> ReuseRules | None:
        settings, layout = self._config.reuse, self._parts.model.layout
        if not settings.enabled:
            return None
        borrowing = BorrowLimits(
            block_size=layout.block_size,
            has_windows=any(group.window is not None for group in layout.groups),
            deadline_s=self._config.handoff.read_deadline_s,
        )
        return ReuseRules(max_lends=settings.max_lends, borrowing=borrowing, rates=self._rates)

    def _note_step(self, record: StepRecord) -> None:
        self._rates.note_step(record)
        self.desk.vitals.note_step(record)
        if self._step_log is not None:
            self._step_log.append(record)

    def _sink(self, output: StepOutput) -> None:
        self._loop.call_soon_threadsafe(self._take, output)

    def _take(self, output: StepOutput) -> None:
        self.desk.on_output(output)
        self._membership.note(output.changes)


def agent_name(worker_id: str) -> str:
    """A transport name for a new life of a worker; the same name is never used twice."""
    return peer_agent_name(worker_id, uuid.uuid4().hex)


def incarnation_of(agent: str) -> str:
    """The life that a transport name belongs to."""
    return agent.rpartition("/")[2]


def _digester(model: ModelHost) -> DigestBlock:
    arena, numbers = model.arena, range(len(model.layout.groups))
    offsets, sizes = map(arena.group_offset, numbers), map(model.layout.block_bytes, numbers)
    return BlockDigester(arena.buffer, tuple(offsets), tuple(sizes)).digest


def _open_step_log(folder: str | None, worker_id: str) -> StepLog | None:
    if folder is None:
        return None
    Path(folder).mkdir(parents=True, exist_ok=True)
    return StepLog(Path(folder) / f"{worker_id}.jsonl")
