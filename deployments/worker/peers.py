"""Other workers whose blocks this worker may read: channels, connected transports, and forgetting the dead."""

import asyncio
import logging
from dataclasses import dataclass

import grpc

from deployments.worker.block_owner import RemoteOwner
from deployments.worker.pull import LocalGroups
from kv_store.handoff_reader import HandoffReader
from kv_store.layout import Arena
from kv_store.registry.protocol import Registry, WorkerRecord
from kv_store.transfer.protocol import BlockTransport
from messages.errors import LayoutMismatch, RegistryError, TransferError
from messages.handoff import Handoff

log = logging.getLogger(__name__)

POLL_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class Peer:
    """One life of another worker."""

    channel: grpc.aio.Channel
    owner: RemoteOwner
    agent_name: str


class Peers:
    """One entry per (worker, incarnation) that is alive; a transport is connected when a peer appears."""

    def __init__(
        self,
        worker_id: str,
        fingerprint: str,
        registry: Registry,
        transport: BlockTransport,
        arena: Arena,
        read_deadline_s: float,
    ) -> None:
        self._worker_id = worker_id
        self._fingerprint = fingerprint
        self._registry = registry
        self._transport = transport
        self._arena = arena
        self._read_deadline_s = read_deadline_s
        self._peers: dict[tuple[str, str], Peer] = {}
        self._lock = asyncio.Lock()

    async def watch(self) -> None:
        """Follow the worker table until cancelled."""
        while True:
            try:
                records = await self._registry.workers()
            except RegistryError:
                # Nothing is known, so nothing changes: hand-offs carry all that a read needs.
                await asyncio.sleep(POLL_PERIOD_S)
                continue
            await self._follow(records)
            await asyncio.sleep(POLL_PERIOD_S)

    async def _follow(self, records: list[WorkerRecord]) -> None:
        wanted = {
            (record.worker_id, record.incarnation): record
            for record in records
            if record.worker_id != self._worker_id
            and record.fingerprint == self._fingerprint
            and record.role in ("prefill", "unified")
        }
        for key in [key for key in self._peers if key not in wanted]:
            await self._forget(key)
        for key, record in wanted.items():
            try:
                await self._peer(key, record.address)
            except TransferError as error:
                log.info("peer.unreachable worker_id=%s error=%s", record.worker_id, error)

    async def make_reader(self, handoff: Handoff, groups: LocalGroups) -> HandoffReader:
        """A reader for `handoff` into the local blocks `groups`.

        Raises:
            LayoutMismatch: The owner lays KV out differently.
            TransferError: The owner cannot be reached.
        """
        if handoff.fingerprint != self._fingerprint:
            raise LayoutMismatch("the owner of the blocks lays KV out differently", owner=handoff.worker_id)
        peer = await self._peer((handoff.worker_id, handoff.incarnation), handoff.address)
        layout = self._arena.layout
        return HandoffReader(
            handoff,
            peer.owner,
            self._transport,
            group_offsets=tuple(self._arena.group_offset(g) for g in range(len(layout.groups))),
            block_bytes=tuple(layout.block_bytes(g) for g in range(len(layout.groups))),
            block_size=layout.block_size,
            local_groups=groups,
            read_deadline_s=self._read_deadline_s,
        )

    async def _peer(self, key: tuple[str, str], address: str) -> Peer:
        async with self._lock:
            peer = self._peers.get(key)
            if peer is None:
                channel = grpc.aio.insecure_channel(address)
                owner = RemoteOwner(channel, reader_id=self._worker_id)
                try:
                    described = await owner.describe()
                    await self._transport.connect(described.agent_name, described.agent_metadata)
                except BaseException:
                    await channel.close()
                    raise
                peer = Peer(channel, owner, described.agent_name)
                self._peers[key] = peer
                log.info("peer.connected worker_id=%s incarnation=%s", *key)
            return peer

    async def _forget(self, key: tuple[str, str]) -> None:
        async with self._lock:
            peer = self._peers.pop(key)
            await peer.channel.close()
            await self._transport.disconnect(peer.agent_name)
            log.info("peer.forgotten worker_id=%s incarnation=%s", *key)

    async def close(self) -> None:
        """Close every channel."""
        for key in list(self._peers):
            await self._forget(key)
