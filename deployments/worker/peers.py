"""Other workers whose blocks this worker may read: channels, connected transports, and forgetting the dead."""

import asyncio
import logging
import time
import weakref
from dataclasses import dataclass, field

import grpc

from deployments.worker.block_owner import RemoteOwner
from kv_store.handoff_close import DigestBlock
from kv_store.handoff_reader import ArenaGeometry, HandoffReader, LocalGroups
from kv_store.layout import Arena
from kv_store.registry.protocol import Registry, WorkerRecord
from kv_store.transfer.protocol import BlockTransport
from messages.errors import LayoutMismatch, RegistryError, TransferError
from messages.handoff import Handoff

log = logging.getLogger(__name__)

POLL_PERIOD_S = 1.0
CHANNEL_OPTIONS = (("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 2000))


@dataclass(slots=True)
class Peer:
    """One life of another worker."""

    channel: grpc.aio.Channel
    owner: RemoteOwner
    is_connected: bool = False
    """The transport was connected ahead of the first read."""
    missing_s: float | None = None
    """When it was first missing in the table; None: it is there, or was never asked for."""
    readers: weakref.WeakSet[HandoffReader] = field(default_factory=weakref.WeakSet)

    @property
    def is_idle(self) -> bool:
        """Whether no hand-off of it is being read."""
        return all(reader.is_over for reader in self.readers)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLimits:
    """Bounds on the use of other workers."""

    read_deadline_s: float
    """Of each read of blocks."""
    max_peers: int = 1024
    """Lives of workers known at a time; the one used least recently that is not being read makes room."""
    grace_s: float = 0.0
    """A life that is missing in the table is kept for so long: the registry may have lost it, and is filled again."""


class Peers:
    """One entry per (worker, incarnation) that is alive or being read, least recently used first.

    The transport is connected when a worker that prefills appears, because the first transfer to it costs up to
    seconds, and disconnected when its life is over and nothing of it is being read any more.
    """

    def __init__(
        self,
        worker_id: str,
        registry: Registry,
        transport: BlockTransport,
        arena: Arena,
        limits: PeerLimits,
        digest: DigestBlock | None = None,
    ) -> None:
        self._worker_id = worker_id
        self._registry = registry
        self._transport = transport
        self._fingerprint = arena.layout.fingerprint
        self._limits = limits
        numbers = range(len(arena.layout.groups))
        self._geometry = ArenaGeometry(
            group_offsets=tuple(arena.group_offset(group) for group in numbers),
            block_bytes=tuple(arena.layout.block_bytes(group) for group in numbers),
            block_size=arena.layout.block_size,
            digest=digest,
        )
        self._peers: dict[tuple[str, str], Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    async def watch(self) -> None:
        """Follow the worker table until cancelled."""
        while True:
            try:
                await self.follow(await self._registry.workers())
            except RegistryError:
                # Nothing is known, so nothing changes: a hand-off carries all that a read needs.
                log.debug("registry.unreachable")
            await asyncio.sleep(POLL_PERIOD_S)

    async def follow(self, records: list[WorkerRecord]) -> None:
        """Forget the lives that are not in the table any more, connect to those that appeared."""
        live = {
            (record.worker_id, record.incarnation): record
            for record in records
            if record.worker_id != self._worker_id and record.fingerprint == self._fingerprint
        }
        replaced = {record.worker_id for record in records}
        now_s = time.monotonic()
        for key in list(self._peers):
            peer = self._peers[key]
            if key in live:
                peer.missing_s = None
                continue
            peer.missing_s = now_s if peer.missing_s is None else peer.missing_s
            is_over = key[0] in replaced or now_s - peer.missing_s >= self._limits.grace_s
            # A worker that drains has left the table and still lends what it had promised.
            if is_over and peer.is_idle:
                await self._forget(key)
        prefilling = [(key, record) for key, record in live.items() if record.role in ("prefill", "unified")]
        places = [(key, self._peers.get(key) or self._peer(key, record.address)) for key, record in prefilling]
        fresh = [(key, peer) for key, peer in places[: self._limits.max_peers] if not peer.is_connected]
        # At the same time, for one that does not answer costs seconds.
        await asyncio.gather(*(self._connect(key, peer) for key, peer in fresh))
        await self._make_room()

    async def _connect(self, key: tuple[str, str], peer: Peer) -> None:
        try:
            described = await peer.owner.describe()
            if described.incarnation != key[1] or self._peers.get(key) is not peer:
                # Another life listens on the address; the table will say so soon.
                return
            await self._transport.connect(described.agent_name, described.agent_metadata)
        except TransferError as error:
            log.info("peer.unreachable worker_id=%s error=%s", key[0], error)
        else:
            peer.is_connected = True
            log.info("peer.connected worker_id=%s agent=%s", key[0], described.agent_name)

    def make_reader(self, handoff: Handoff, groups: LocalGroups) -> HandoffReader:
        """A reader for `handoff` into the local blocks `groups`.

        Raises:
            LayoutMismatch: The owner lays KV out differently.
            HandoffError: The hand-off does not fit this worker; see `HandoffReader`.
        """
        if handoff.fingerprint != self._fingerprint:
            raise LayoutMismatch("the owner lays KV out differently", handoff_id=handoff.handoff_id)
        peer = self._peer((handoff.worker_id, handoff.incarnation), handoff.address)
        deadline_s = self._limits.read_deadline_s
        reader = HandoffReader(handoff, peer.owner, self._transport, self._geometry, groups, deadline_s)
        peer.readers.add(reader)
        return reader

    def owner(self, worker_id: str, incarnation: str, address: str) -> RemoteOwner:
        """One life of another worker, to be asked for a prefix."""
        return self._peer((worker_id, incarnation), address).owner

    def _peer(self, key: tuple[str, str], address: str) -> Peer:
        peer = self._peers.pop(key, None)
        if peer is None:
            channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
            owner = RemoteOwner(channel, reader_id=self._worker_id, fingerprint=self._fingerprint)
            peer = Peer(channel, owner)
        # Put back at the end of the order.
        self._peers[key] = peer
        return peer

    async def _make_room(self) -> None:
        idle = [key for key, peer in self._peers.items() if peer.is_idle]
        for key in idle[: max(0, len(self._peers) - self._limits.max_peers)]:
            await self._forget(key)

    async def _forget(self, key: tuple[str, str]) -> None:
        peer = self._peers.pop(key)
        await peer.channel.close()
        # A read may have connected it too, so ask by the name that this life must have.
        await self._transport.disconnect(peer_agent_name(*key))
        log.info("peer.forgotten worker_id=%s incarnation=%s", *key)

    async def close(self) -> None:
        """Close every channel."""
        for key in list(self._peers):
            await self._forget(key)


def peer_agent_name(worker_id: str, incarnation: str) -> str:
    """Transport name of one life of a worker; the same name is never used twice."""
    return f"{worker_id}/{incarnation}"
