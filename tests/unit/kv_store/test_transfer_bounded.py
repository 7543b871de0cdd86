import asyncio

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_store.transfer.bounded import BoundedTransport
from kv_store.transfer.loopback import LoopbackNetwork, LoopbackTransport
from kv_store.transfer.protocol import ByteRange
from messages.errors import PeerUnreachable, TransferError

SIZE = 256
PIECE = [ByteRange(remote_offset=0, local_offset=0, size=16)]


class World:
    def __init__(self, num_owners: int, max_peers: int) -> None:
        self.network = LoopbackNetwork()
        self.owners = [
            LoopbackTransport(f"p-{number}", torch.zeros(SIZE, dtype=torch.uint8), self.network)
            for number in range(num_owners)
        ]
        self.inner = LoopbackTransport("d", torch.zeros(SIZE, dtype=torch.uint8), self.network, connect_timeout_s=0.05)
        self.transport = BoundedTransport(self.inner, max_peers)

    async def connect(self, number: int) -> None:
        await self.transport.connect(f"p-{number}", self.owners[number].metadata())

    async def read(self, number: int) -> int:
        return await self.transport.read(f"p-{number}", PIECE, deadline_s=5)


async def test_the_peer_used_least_recently_makes_room() -> None:
    world = World(num_owners=3, max_peers=2)
    await world.connect(0)
    await world.connect(1)
    await world.read(0)

    await world.connect(2)

    assert world.inner.num_peers == 2
    assert await world.read(0) == 16
    with pytest.raises(PeerUnreachable):
        await world.read(1)


async def test_peers_that_are_being_read_keep_their_place() -> None:
    world = World(num_owners=3, max_peers=2)
    await world.connect(0)
    await world.connect(1)
    for number in (0, 1):
        world.network.stop(f"p-{number}")
    reads = [asyncio.create_task(world.read(number)) for number in (0, 1)]
    await asyncio.sleep(0.01)

    with pytest.raises(TransferError, match="every peer that may be connected"):
        await world.connect(2)
    for number in (0, 1):
        world.network.resume(f"p-{number}")

    assert await asyncio.gather(*reads) == [16, 16]
    await world.connect(2)
    assert world.inner.num_peers == 2


async def test_a_peer_that_cannot_be_reached_takes_no_place() -> None:
    world = World(num_owners=2, max_peers=1)
    world.network.stop("p-0")
    with pytest.raises(PeerUnreachable):
        await world.connect(0)

    await world.connect(1)

    assert world.inner.num_peers == 1
    assert await world.read(1) == 16


async def test_connecting_again_is_no_new_peer() -> None:
    world = World(num_owners=2, max_peers=2)

    await asyncio.gather(*(world.connect(number) for number in (0, 1, 0, 1)))

    assert world.inner.num_peers == 2
    assert [await world.read(number) for number in (0, 1)] == [16, 16]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["connect", "read", "disconnect"]), st.integers(0, 4)), max_size=30))
def test_there_are_never_more_peers_than_allowed(steps: list[tuple[str, int]]) -> None:
    """Case 3: the number of registrations is bounded."""

    async def run() -> None:
        world = World(num_owners=5, max_peers=3)
        connected: list[int] = []
        for kind, number in steps:
            if kind == "connect":
                await world.connect(number)
                connected = [*(n for n in connected if n != number), number][-3:]
            elif kind == "disconnect":
                await world.transport.disconnect(f"p-{number}")
                connected = [n for n in connected if n != number]
            elif number in connected:
                assert await world.read(number) == 16
                connected = [*(n for n in connected if n != number), number]
            else:
                with pytest.raises(PeerUnreachable):
                    await world.read(number)
            assert world.inner.num_peers == len(connected)

    asyncio.run(run())
