"""What every transport promises, as scenarios over a small world of one reader and owners that can stop and die."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

import pytest
import torch

from kv_store.transfer.bounded import BoundedTransport
from kv_store.transfer.faulty import FaultyTransport
from kv_store.transfer.protocol import BlockTransport, ByteRange, destination_free
from messages.errors import PeerUnreachable, TransferError, TransferTimeout
from messages.fault_plan import parse_faults
from messages.faults import Faults

SIZE = 4 << 20
BLOCK = 64 << 10
UNTOUCHED = 255


class Owner(Protocol):
    """One life of a worker that others read from."""

    agent_name: str
    metadata: bytes

    async def fill(self, seed: int) -> None: ...
    async def stop(self) -> None: ...
    async def resume(self) -> None: ...
    async def kill(self) -> None: ...


class World(Protocol):
    """One reader, and as many owners as a scenario asks for; `owner` is shared by those that leave it alive."""

    reader: BlockTransport
    local: torch.Tensor
    owner: Owner
    num_restarts: int
    maps_its_owners: bool
    """Reads need no answer of an owner."""

    async def start_owner(self) -> Owner: ...


def pattern(seed: int) -> torch.Tensor:
    """The bytes of an owner filled with `seed`; never UNTOUCHED."""
    return ((torch.arange(SIZE, dtype=torch.int64) * 7 + seed) % 251).to(torch.uint8)


def blocks(*pairs: tuple[int, int]) -> list[ByteRange]:
    """Ranges of one block each, from (remote block, local block)."""
    return [ByteRange(remote_offset=src * BLOCK, local_offset=dst * BLOCK, size=BLOCK) for src, dst in pairs]


async def connected(world: World, seed: int) -> Owner:
    world.local.fill_(UNTOUCHED)
    await world.owner.fill(seed)
    await world.reader.connect(world.owner.agent_name, world.owner.metadata)
    return world.owner


def holds(world: World, ranges: list[ByteRange], seed: int) -> bool:
    """Whether exactly `ranges` have arrived and every other local byte is untouched."""
    expected = torch.full((SIZE,), UNTOUCHED, dtype=torch.uint8)
    source = pattern(seed)
    for piece in ranges:
        data = source[piece.remote_offset : piece.remote_offset + piece.size]
        expected[piece.local_offset : piece.local_offset + piece.size] = data
    return torch.equal(world.local, expected)


async def scattered_blocks_arrive_and_nothing_else_changes(world: World) -> None:
    owner = await connected(world, 3)
    ranges = blocks((9, 1), (2, 60), (3, 61), (50, 30))

    size = await world.reader.read(owner.agent_name, ranges, deadline_s=10)

    assert size == 4 * BLOCK
    assert holds(world, ranges, 3)


async def single_bytes_and_odd_sizes_arrive(world: World) -> None:
    owner = await connected(world, 4)
    ranges = [
        ByteRange(remote_offset=0, local_offset=SIZE - 1, size=1),
        ByteRange(remote_offset=SIZE - 3, local_offset=5, size=3),
        ByteRange(remote_offset=17, local_offset=4097, size=4099),
    ]

    await world.reader.read(owner.agent_name, ranges, deadline_s=10)

    assert holds(world, ranges, 4)


async def the_whole_memory_arrives_in_one_read(world: World) -> None:
    owner = await connected(world, 5)
    whole = [ByteRange(remote_offset=0, local_offset=0, size=SIZE)]

    assert await world.reader.read(owner.agent_name, whole, deadline_s=20) == SIZE

    assert torch.equal(world.local, pattern(5))


async def an_empty_read_moves_nothing(world: World) -> None:
    owner = await connected(world, 6)

    assert await world.reader.read(owner.agent_name, [], deadline_s=10) == 0

    assert holds(world, [], 6)


async def a_range_outside_either_memory_is_refused_before_anything_moves(world: World) -> None:
    owner = await connected(world, 7)
    good = ByteRange(remote_offset=0, local_offset=0, size=8)

    for bad in (
        ByteRange(remote_offset=SIZE - 7, local_offset=8, size=8),
        ByteRange(remote_offset=-1, local_offset=8, size=8),
        ByteRange(remote_offset=0, local_offset=SIZE - 7, size=8),
        ByteRange(remote_offset=0, local_offset=-8, size=8),
        ByteRange(remote_offset=0, local_offset=8, size=0),
        ByteRange(remote_offset=100, local_offset=4, size=8),
    ):
        with pytest.raises(TransferError) as caught:
            await world.reader.read(owner.agent_name, [good, bad], deadline_s=10)
        assert destination_free(caught.value) is None

    assert holds(world, [], 7)


async def metadata_that_is_malformed_or_of_another_agent_is_refused(world: World) -> None:
    owner = world.owner
    await world.reader.disconnect(owner.agent_name)

    for name, metadata in (("x", b"nonsense"), ("x", b""), ("x", owner.metadata[:10]), ("x", owner.metadata)):
        with pytest.raises(TransferError):
            await world.reader.connect(name, metadata)

    assert world.reader.num_peers == 0


async def a_peer_that_is_not_connected_cannot_be_read(world: World) -> None:
    with pytest.raises(PeerUnreachable):
        await world.reader.read("nobody", blocks((0, 0)), deadline_s=10)


async def connecting_twice_is_one_peer_and_disconnecting_forgets_it(world: World) -> None:
    owner = await connected(world, 8)
    await asyncio.gather(*(world.reader.connect(owner.agent_name, owner.metadata) for _ in range(3)))
    assert world.reader.num_peers == 1

    await world.reader.disconnect(owner.agent_name)
    await world.reader.disconnect(owner.agent_name)

    assert world.reader.num_peers == 0
    with pytest.raises(PeerUnreachable):
        await world.reader.read(owner.agent_name, blocks((0, 0)), deadline_s=10)


async def a_peer_that_was_forgotten_can_be_connected_again(world: World) -> None:
    owner = await connected(world, 9)
    await world.reader.disconnect(owner.agent_name)

    await world.reader.connect(owner.agent_name, owner.metadata)
    await world.reader.read(owner.agent_name, blocks((1, 2)), deadline_s=10)

    assert holds(world, blocks((1, 2)), 9)


async def reads_at_the_same_time_do_not_mix(world: World) -> None:
    owner = await connected(world, 10)
    pairs = [(i, 63 - i) for i in range(0, 64, 2)]

    await asyncio.gather(
        *(world.reader.read(owner.agent_name, blocks(pair), deadline_s=20) for pair in pairs),
    )

    assert holds(world, blocks(*pairs), 10)


async def a_read_of_a_stopped_owner_ends_at_its_deadline_and_says_when_the_destination_is_quiet(world: World) -> None:
    owner = await connected(world, 11)
    await owner.stop()
    started_s = time.monotonic()
    try:
        await world.reader.read(owner.agent_name, blocks((5, 6)), deadline_s=0.3)
    except TransferTimeout as error:
        # Over shared memory the kernel reads a stopped process; then there is no error and the bytes are right.
        assert time.monotonic() - started_s < 2
        quiet = destination_free(error)
        assert quiet is not None
        assert not quiet.done()
        await owner.resume()
        await asyncio.wait_for(quiet, 10)
        world.local.fill_(UNTOUCHED)
        await world.reader.read(owner.agent_name, blocks((7, 8)), deadline_s=10)
        assert holds(world, blocks((7, 8)), 11), "bytes of the read that was given up landed late"
    else:
        await owner.resume()
        assert holds(world, blocks((5, 6)), 11)


async def cancelling_a_read_of_a_stopped_owner_is_bounded(world: World) -> None:
    owner = await connected(world, 12)
    await owner.stop()
    read = asyncio.create_task(world.reader.read(owner.agent_name, blocks((5, 6)), deadline_s=30))
    await asyncio.sleep(0.1)
    is_stuck = not read.done()
    read.cancel()
    await asyncio.wait([read], timeout=5)

    assert read.done()
    assert read.cancelled() == is_stuck

    await owner.resume()
    await world.reader.disconnect(owner.agent_name)
    assert world.reader.num_peers == 0


async def a_stopped_owner_is_unreachable_at_connecting_and_comes_back(world: World) -> None:
    owner = await world.start_owner()
    await owner.fill(13)
    world.local.fill_(UNTOUCHED)
    await owner.stop()
    # What is mapped needs no answer.
    with suppress(PeerUnreachable) if world.maps_its_owners else pytest.raises(PeerUnreachable):
        await world.reader.connect(owner.agent_name, owner.metadata)

    await owner.resume()
    await world.reader.connect(owner.agent_name, owner.metadata)
    await world.reader.read(owner.agent_name, blocks((1, 1)), deadline_s=10)

    assert holds(world, blocks((1, 1)), 13)
    await world.reader.disconnect(owner.agent_name)
    await owner.kill()


async def a_killed_owner_fails_its_reads_soon_and_the_reader_goes_on_with_its_successor(world: World) -> None:
    for _ in range(world.num_restarts):
        owner = await world.start_owner()
        await world.reader.connect(owner.agent_name, owner.metadata)
        await world.reader.read(owner.agent_name, blocks((0, 0)), deadline_s=10)
        await owner.kill()

        started_s = time.monotonic()
        with pytest.raises(TransferError) as caught:
            await world.reader.read(owner.agent_name, blocks((1, 1)), deadline_s=10)
        assert time.monotonic() - started_s < 5
        quiet = destination_free(caught.value)
        if quiet is not None:
            await asyncio.wait_for(quiet, 5)
        await world.reader.disconnect(owner.agent_name)
        assert world.reader.num_peers == 0

    survivor = await connected(world, 14)
    await world.reader.read(survivor.agent_name, blocks((3, 4)), deadline_s=10)
    assert holds(world, blocks((3, 4)), 14)


async def killing_a_stopped_owner_frees_the_destination_of_a_read_that_hangs(world: World) -> None:
    num_peers = world.reader.num_peers
    owner = await world.start_owner()
    await world.reader.connect(owner.agent_name, owner.metadata)
    await owner.stop()
    try:
        await world.reader.read(owner.agent_name, blocks((1, 1)), deadline_s=0.2)
    except TransferTimeout as error:
        quiet = destination_free(error)
        assert quiet is not None
        await owner.kill()
        await asyncio.wait_for(quiet, 5)
    else:
        await owner.kill()

    await world.reader.disconnect(owner.agent_name)

    assert world.reader.num_peers == num_peers


async def a_new_peer_takes_the_place_of_the_one_used_least_recently_and_a_dead_one_is_refused_soon(
    world: World,
) -> None:
    """Cases 3 and 24."""
    owner = await connected(world, 15)
    await world.reader.disconnect(owner.agent_name)
    bounded = BoundedTransport(world.reader, max_peers=1)
    successor = await world.start_owner()
    await bounded.connect(owner.agent_name, owner.metadata)

    await bounded.connect(successor.agent_name, successor.metadata)
    assert world.reader.num_peers == 1
    await bounded.read(successor.agent_name, blocks((0, 0)), deadline_s=10)
    with pytest.raises(PeerUnreachable):
        await bounded.read(owner.agent_name, blocks((1, 1)), deadline_s=10)

    await successor.kill()
    await bounded.disconnect(successor.agent_name)
    started_s = time.monotonic()
    with pytest.raises(TransferError):
        await bounded.connect(successor.agent_name, successor.metadata)
    assert time.monotonic() - started_s < 10

    world.local.fill_(UNTOUCHED)
    await bounded.connect(owner.agent_name, owner.metadata)
    await bounded.read(owner.agent_name, blocks((2, 3)), deadline_s=10)
    assert world.reader.num_peers == 1
    assert holds(world, blocks((2, 3)), 15)


def faulty(world: World, plan: str) -> FaultyTransport:
    return FaultyTransport(world.reader, world.local, Faults(parse_faults(plan)))


async def throttled_reads_take_their_time_and_share_the_rate(world: World) -> None:
    owner = await connected(world, 16)
    slow = faulty(world, "transfer.read:throttle=0.01")
    num_blocks = 16
    started_s = time.monotonic()

    reads = [blocks(*((n, n) for n in range(first, first + num_blocks))) for first in (0, num_blocks)]
    await asyncio.gather(*(slow.read(owner.agent_name, ranges, deadline_s=10) for ranges in reads))

    expected_s = 2 * num_blocks * BLOCK / 0.01e9
    assert time.monotonic() - started_s >= expected_s
    assert holds(world, [*reads[0], *reads[1]], 16)


async def a_read_slower_than_its_deadline_times_out_and_leaves_its_destination_free(world: World) -> None:
    owner = await connected(world, 17)
    started_s = time.monotonic()

    for plan in ("transfer.read:throttle=0.0001", "transfer.read:delay=5", "transfer.read:delay=0.2"):
        with pytest.raises(TransferTimeout) as caught:
            await faulty(world, plan).read(owner.agent_name, blocks((1, 1)), deadline_s=0.2)
        assert destination_free(caught.value) is None

    assert time.monotonic() - started_s >= 0.6


async def a_corrupted_read_differs_in_one_bit_and_nowhere_else(world: World) -> None:
    owner = await connected(world, 18)

    size = await faulty(world, "transfer.read:corrupt*1").read(owner.agent_name, blocks((4, 9), (5, 2)), deadline_s=10)

    assert size == 2 * BLOCK
    assert not holds(world, blocks((4, 9), (5, 2)), 18)
    world.local[10 * BLOCK - 1] ^= 1
    assert holds(world, blocks((4, 9), (5, 2)), 18)


async def a_read_that_fails_on_purpose_fails_after_the_bytes(world: World) -> None:
    owner = await connected(world, 19)
    failing = faulty(world, "transfer.read:error*1")

    with pytest.raises(TransferError) as caught:
        await failing.read(owner.agent_name, blocks((4, 9)), deadline_s=10)
    assert destination_free(caught.value) is None
    assert holds(world, blocks((4, 9)), 19)

    assert await failing.read(owner.agent_name, blocks((5, 2)), deadline_s=10) == BLOCK


Scenario = Callable[[World], Awaitable[None]]

SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        scattered_blocks_arrive_and_nothing_else_changes,
        single_bytes_and_odd_sizes_arrive,
        the_whole_memory_arrives_in_one_read,
        an_empty_read_moves_nothing,
        a_range_outside_either_memory_is_refused_before_anything_moves,
        metadata_that_is_malformed_or_of_another_agent_is_refused,
        a_peer_that_is_not_connected_cannot_be_read,
        connecting_twice_is_one_peer_and_disconnecting_forgets_it,
        a_peer_that_was_forgotten_can_be_connected_again,
        reads_at_the_same_time_do_not_mix,
        a_read_of_a_stopped_owner_ends_at_its_deadline_and_says_when_the_destination_is_quiet,
        cancelling_a_read_of_a_stopped_owner_is_bounded,
        a_stopped_owner_is_unreachable_at_connecting_and_comes_back,
        a_killed_owner_fails_its_reads_soon_and_the_reader_goes_on_with_its_successor,
        killing_a_stopped_owner_frees_the_destination_of_a_read_that_hangs,
        a_new_peer_takes_the_place_of_the_one_used_least_recently_and_a_dead_one_is_refused_soon,
        throttled_reads_take_their_time_and_share_the_rate,
        a_read_slower_than_its_deadline_times_out_and_leaves_its_destination_free,
        a_corrupted_read_differs_in_one_bit_and_nowhere_else,
        a_read_that_fails_on_purpose_fails_after_the_bytes,
    )
}
