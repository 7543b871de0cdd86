"""Other workers as a reader knows them, over real gRPC: lives come and go, registrations stay bounded (cases 2, 3)."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Self

import grpc

from deployments.worker.block_owner import BlockOwner
from deployments.worker.peers import PeerLimits, Peers, peer_agent_name
from kv_store.handoff import HandoffTable
from kv_store.layout import Arena, BlockLayout, KvGroup
from kv_store.registry.memory import MemoryRegistry
from kv_store.registry.protocol import WorkerRecord
from kv_store.transfer.bounded import BoundedTransport
from kv_store.transfer.loopback import LoopbackNetwork, LoopbackTransport
from messages.handoff import BlockId, BlockKey, BlockRef, Handoff
from messages.requests import RequestId
from messages.v1 import worker_pb2_grpc

LAYOUT = BlockLayout(
    groups=(KvGroup(name="all", layers=(0,), num_kv_heads=1, k_dim=4, v_dim=4),), block_size=16, model_digest="m"
)
NUM_BLOCKS = 4


class Keeper:
    """The blocks of these owners belong to nobody."""

    def settle(self) -> None: ...

    async def lend(self, keys: Sequence[BlockKey], first_block: int) -> Handoff | None:
        return None


class Life:
    """One life of a worker that others read from; leaving the context is its death."""

    def __init__(self, world: "World", incarnation: str, role: str, port: int) -> None:
        self._world = world
        self._incarnation = incarnation
        self._role = role
        self._port = port

    async def __aenter__(self) -> Self:
        self.name = peer_agent_name("p", self._incarnation)
        arena = Arena(LAYOUT, (NUM_BLOCKS,))
        self._transport = LoopbackTransport(self.name, arena.buffer, self._world.network)
        # The reuse of a port by the next life is the point.
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        self._port = self._server.add_insecure_port(f"127.0.0.1:{self._port}")
        self.address = f"127.0.0.1:{self._port}"
        self.table = HandoffTable(
            worker_id="p",
            incarnation=self._incarnation,
            address=self.address,
            fingerprint=LAYOUT.fingerprint,
            lease_s=5.0,
        )
        owner = BlockOwner(self.table, self._transport, (0,), lambda: 0.0, Keeper())
        worker_pb2_grpc.add_BlockOwnerServicer_to_server(owner, self._server)
        await self._server.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._server.stop(None)
        self._transport.close()

    @property
    def port(self) -> int:
        return self._port

    def record(self) -> WorkerRecord:
        return WorkerRecord(
            worker_id="p",
            incarnation=self._incarnation,
            address=self.address,
            pool="p",
            role=self._role,
            model="m",
            fingerprint=LAYOUT.fingerprint,
            block_size=16,
            key_model="m",
            key_codec="c",
            context_length=64,
        )

    def offer(self, request_id: str = "r") -> Handoff:
        return self.table.grant(RequestId(request_id), ((BlockRef(block_id=BlockId(1), key=None),),), 16, 0.0)


class World:
    """A reader without an engine."""

    def __init__(self, max_peers: int = 8) -> None:
        self.network = LoopbackNetwork()
        arena = Arena(LAYOUT, (NUM_BLOCKS,))
        self.inner = LoopbackTransport("d/1", arena.buffer, self.network, connect_timeout_s=0.5)
        transport = BoundedTransport(self.inner, max_peers)
        limits = PeerLimits(read_deadline_s=2.0, max_peers=max_peers)
        self.peers = Peers("d", MemoryRegistry(), transport, arena, limits)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.peers.close()

    def life(self, incarnation: str, role: str = "prefill", port: int = 0) -> Life:
        return Life(self, incarnation, role, port)

    async def read(self, life: Life, request_id: str = "r") -> int:
        reader = self.peers.make_reader(life.offer(request_id), ((BlockId(2),),))
        try:
            await reader.open()
            await reader.read_through(16)
            return (await reader.close()).good_tokens
        finally:
            await reader.abandon()


async def test_twenty_lives_on_one_address_leave_no_more_registrations_than_live_peers() -> None:
    """Cases 2 and 3."""
    port = 0
    async with World() as world:
        for number in range(20):
            async with world.life(f"life-{number}", port=port) as life:
                port = life.port
                await world.peers.follow([life.record()])
                assert await world.read(life) == 16
                assert (len(world.peers), world.inner.num_peers) == (1, 1)

        await world.peers.follow([])
        assert (len(world.peers), world.inner.num_peers) == (0, 0)


async def test_a_peer_that_only_a_read_has_connected_is_forgotten_too() -> None:
    async with World() as world, world.life("a", role="decode") as life:
        await world.peers.follow([life.record()])
        assert world.inner.num_peers == 0
        await world.read(life)
        assert world.inner.num_peers == 1
        await world.peers.follow([life.record()])
        assert world.inner.num_peers == 1

        await world.peers.follow([])

        assert (len(world.peers), world.inner.num_peers) == (0, 0)


async def test_a_worker_that_drains_is_read_to_the_end() -> None:
    async with World() as world, world.life("a") as life:
        await world.peers.follow([life.record()])
        reader = world.peers.make_reader(life.offer(), ((BlockId(2),),))
        await reader.open()

        await world.peers.follow([])
        await reader.read_through(16)
        assert (await reader.close()).good_tokens == 16

        await world.peers.follow([])
        assert (len(world.peers), world.inner.num_peers) == (0, 0)


async def test_another_life_on_the_address_is_not_taken_for_the_one_in_the_table() -> None:
    async with World() as world, world.life("new") as life:
        stale = world.life("old")
        stale.address = life.address

        await world.peers.follow([stale.record()])

        assert world.inner.num_peers == 0


async def test_there_are_no_more_peers_than_allowed() -> None:
    async with World(max_peers=2) as world, AsyncExitStack() as exits:
        lives = [await exits.enter_async_context(world.life(f"life-{number}", role="decode")) for number in range(5)]
        for number, life in enumerate(lives):
            assert await world.read(life, f"r{number}") == 16
            assert world.inner.num_peers <= 2

        await world.peers.follow([life.record() for life in lives])

        assert len(world.peers) == world.inner.num_peers == 2


async def test_one_peer_that_does_not_answer_does_not_keep_the_others_waiting() -> None:
    async with World() as world, world.life("stopped") as stopped, world.life("good") as good:
        world.network.stop(stopped.name)
        following = asyncio.create_task(world.peers.follow([stopped.record(), good.record()]))

        async with asyncio.timeout(0.4):
            while world.inner.num_peers < 1:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)

        assert await world.read(good) == 16
        await following
        assert world.inner.num_peers == 1
