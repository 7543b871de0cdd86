"""One worker, whole, without Serve: engine, hand-offs, gateway link, transport and its place in the registry."""

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Self

import grpc

from deployments.config import AppConfig, PoolConfig
from deployments.worker.block_owner import BlockOwner
from deployments.worker.desk import Desk, WorkerIdentity
from deployments.worker.link import WorkerLink
from deployments.worker.membership import Membership
from deployments.worker.model_host import ModelHost, load_host
from deployments.worker.peers import Peers
from engine.events import StepOutput
from kv_store.handoff import HandoffTable
from kv_store.registry.protocol import WorkerRecord
from kv_store.registry.redis import RedisRegistry
from kv_store.registry.shard import ShardFailure
from kv_store.transfer.nixl import NixlTransport
from messages.errors import ServingError
from messages.v1 import worker_pb2_grpc
from telemetry.metrics import WorkerCounter
from telemetry.step_record import StepLog

log = logging.getLogger(__name__)

HEARTBEAT_PERIOD_S = 0.2
EXPIRY_PERIOD_S = 0.25
GRPC_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.max_send_message_length", 64 * 2**20),
    # A used port must be an error, not a second listener.
    ("grpc.so_reuseport", 0),
)


class WorkerRuntime:
    """Async context manager: inside it the worker takes work, after it everything is given back."""

    def __init__(self, config: AppConfig, pool: PoolConfig, folder: Path, worker_id: str, host: str) -> None:
        self._config = config
        self._pool = pool
        self._folder = folder
        self._host = host
        self._worker_id = worker_id
        self._incarnation = uuid.uuid4().hex
        self._tasks: list[asyncio.Task[None]] = []
        self._fault: BaseException | None = None
        self.address = ""

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        model = await asyncio.to_thread(load_host, self._config, self._pool, self._folder)
        self._transport = await asyncio.to_thread(
            NixlTransport, f"{self._worker_id}-{self._incarnation}", model.arena.buffer
        )
        self._server = grpc.aio.server(options=GRPC_OPTIONS)
        port = self._server.add_insecure_port(f"{self._host}:0")
        self.address = f"{self._host}:{port}"
        self._step_log = StepLog(Path(self._config.step_log_dir) / f"{self._worker_id}.jsonl") if (
            self._config.step_log_dir
        ) else None
        self._engine = model.make_engine(self._sink, self._step_log.append if self._step_log else None)
        self._handoffs = HandoffTable(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            address=self.address,
            fingerprint=model.layout.fingerprint,
            lease_s=self._config.handoff.lease_s,
        )
        self._registry = RedisRegistry(
            self._config.registry.urls, self._config.registry.namespace, on_failure=self._on_shard_failure
        )
        self._peers = Peers(
            self._worker_id,
            model.layout.fingerprint,
            self._registry,
            self._transport,
            model.arena,
            self._config.handoff.read_deadline_s,
        )
        identity = WorkerIdentity(
            worker_id=self._worker_id, incarnation=self._incarnation, pool=self._pool.name, role=self._pool.role
        )
        self.desk = Desk(identity, self._engine, self._handoffs, self._peers.make_reader, time.monotonic)
        self._membership = Membership(self._registry, self._record(model), self._config.registry.lease_s)
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
        await asyncio.to_thread(self._transport.close)
        await self._registry.close()
        if self._step_log is not None:
            self._step_log.close()

    async def drain(self, timeout_s: float) -> None:
        """Take no new work and wait until the requests that are here have ended."""
        self.desk.is_draining = True
        await self._membership.leave()
        deadline_s = time.monotonic() + timeout_s
        while self.desk.num_requests and time.monotonic() < deadline_s:
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
            self._transport,
            tuple(model.arena.group_offset(group) for group in range(len(model.layout.groups))),
            time.monotonic,
            self.desk.settle,
        )
        worker_pb2_grpc.add_BlockOwnerServicer_to_server(owner, self._server)
        worker_pb2_grpc.add_WorkerLinkServicer_to_server(WorkerLink(self.desk), self._server)
        self._engine.start()
        await self._server.start()
        self._spawn(self._membership.renew())
        self._spawn(self._membership.publish())
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
            self.desk.send_load()
            await asyncio.sleep(HEARTBEAT_PERIOD_S)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_PERIOD_S)
            self.desk.expire()

    def _sink(self, output: StepOutput) -> None:
        self._loop.call_soon_threadsafe(self._take, output)

    def _take(self, output: StepOutput) -> None:
        self.desk.on_output(output)
        self._membership.note(output.changes)

    def _on_shard_failure(self, failure: ShardFailure) -> None:
        self.desk.count(WorkerCounter.REGISTRY_ERRORS)
        log.debug("registry.failed failure=%s", failure)
