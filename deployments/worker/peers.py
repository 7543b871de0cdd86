"""Other workers whose blocks this worker may read: channels, connected transports, and forgetting the dead."""

import asyncio
import logging
from dataclasses import dataclass

import grpc

from deployments.worker.block_owner import RemoteOwner
from kv_store.handoff_reader import ArenaGeometry, HandoffReader, LocalGroups
from kv_store.layout import Arena
from kv_store.registry.protocol import Registry, WorkerRecord
from kv_store.transfer.protocol import BlockTransport
from messages.errors import RegistryError, TransferError
from messages.handoff import Handoff

log = logging.getLogger(__name__)

POLL_PERIOD_S = 1.0
CHANNEL_OPTIONS = (("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 2000))


@dataclass(slots=True)
class Peer:
    """One life of another worker."""

    channel: grpc.aio.Channel
    owner: RemoteOwner
    agent_name: str | None = None
    """None until the transport was connected ahead of the first hand-off."""


class Peers:
    """One entry per (worker, incarnation) that is alive; the transport is connected when a peer appears."""

    def __init__(
        self, worker_id: str, registry: Registry, transport: BlockTransport, arena: Arena, read_deadline_s: float
    ) -> None:
        self._worker_id = worker_id
        self._registry = registry
        self._transport = transport
        self._fingerprint = arena.layout.fingerprint
        self._read_deadline_s = read_deadline_s
        numbers = range(len(arena.layout.groups))
        self._geometry = ArenaGeometry(
            group_offsets=tuple(arena.group_offset(group) for group in numbers),
            block_bytes=tuple(arena.layout.block_bytes(group) for group in numbers),
            block_size=arena.layout.block_size,
        )
        self._peers: dict[tuple[str, str], Peer] = {}

    async def watch(self) -> None:
        """Follow the worker table until cancelled."""
        while True:
            try:
                await self._follow(await self._registry.workers())
            except RegistryError:
                # Nothing is known, so nothing changes: a hand-off carries all that a read needs.
                log.debug("registry.unreachable")
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
            peer = self._peer(key, record.address)
            if peer.agent_name is None:
                await self._connect(record.worker_id, peer)

    async def _connect(self, worker_id: str, peer: Peer) -> None:
        """Connect ahead: the first transfer to a peer costs up to seconds."""
        try:
            described = await peer.owner.describe()
            await self._transport.connect(described.agent_name, described.agent_metadata)
        except TransferError as error:
            log.info("peer.unreachable worker_id=%s error=%s", worker_id, error)
        else:
            peer.agent_name = described.agent_name
            log.info("peer.connected worker_id=%s agent=%s", worker_id, described.agent_name)

    def make_reader(self, handoff: Handoff, groups: LocalGroups) -> HandoffReader:
        """A reader for `handoff` into the local blocks `groups`."""
        owner = self._peer((handoff.worker_id, handoff.incarnation), handoff.address).owner
        return HandoffReader(handoff, owner, self._transport, self._geometry, groups, self._read_deadline_s)

    def _peer(self, key: tuple[str, str], address: str) -> Peer:
        peer = self._peers.get(key)
        if peer is None:
            channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
            owner = RemoteOwner(channel, reader_id=self._worker_id, fingerprint=self._fingerprint)
            peer = self._peers[key] = Peer(channel, owner)
        return peer

    async def _forget(self, key: tuple[str, str]) -> None:
        peer = self._peers.pop(key)
        await peer.channel.close()
        if peer.agent_name is not None:
            await self._transport.disconnect(peer.agent_name)
        log.info("peer.forgotten worker_id=%s incarnation=%s", *key)

    async def close(self) -> None:
        """Close every channel."""
        for key in list(self._peers):
            await self._forget(key)
