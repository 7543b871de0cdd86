"""Peers of one machine read each other's memory by a plain copy, know each other, and notice a death."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from kv_store.transfer.loopback import LoopbackNetwork, LoopbackTransport
from kv_store.transfer.protocol import ByteRange, destination_free
from kv_store.transfer.same_host import INLINE_BYTES, SameHostTransport
from kv_store.transfer.shared_memory import PeerMapping, SharedAddress, SharedBuffer
from messages.errors import PeerUnreachable, TransferError, TransferTimeout

SIZE = 32 << 20
OWNER = """
import sys
import torch
from kv_store.transfer.loopback import LoopbackNetwork, LoopbackTransport
from kv_store.transfer.same_host import SameHostTransport
from kv_store.transfer.shared_memory import SharedBuffer
shared = SharedBuffer(int(sys.argv[1]))
arena = shared.tensor[64:]
arena.copy_(torch.arange(len(arena)) % 251)
inner = LoopbackTransport("owner", arena, LoopbackNetwork())
print(SameHostTransport(inner, arena, shared).metadata().hex(), flush=True)
sys.stdin.read()
"""


@dataclass
class Pair:
    """A reader here, its owner in a process of its own."""

    owner: subprocess.Popen[str]
    metadata: bytes
    local: torch.Tensor
    reader: SameHostTransport

    async def read(self, *ranges: tuple[int, int, int], deadline_s: float = 5.0) -> None:
        pieces = [ByteRange(remote_offset=src, local_offset=dst, size=size) for src, dst, size in ranges]
        await self.reader.read("owner", pieces, deadline_s=deadline_s)

    def is_right(self, source: int, target: int, size: int) -> bool:
        expected = (torch.arange(source, source + size) % 251).to(torch.uint8)
        return torch.equal(self.local[target : target + size], expected)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    owner = subprocess.Popen(  # noqa: ASYNC220 - it runs all the time
        [sys.executable, "-c", OWNER, str(SIZE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert owner.stdout is not None
    metadata = bytes.fromhex(await asyncio.to_thread(owner.stdout.readline))
    shared = SharedBuffer(SIZE)
    inner = LoopbackTransport("reader", shared.tensor, LoopbackNetwork())
    reader = SameHostTransport(inner, shared.tensor, shared)
    yield Pair(owner, metadata, shared.tensor, reader)
    reader.close()
    owner.kill()
    owner.wait()


async def test_small_and_large_reads_bring_the_owners_bytes_and_touch_nothing_else(pair: Pair) -> None:
    await pair.reader.connect("owner", pair.metadata)

    await pair.read((5, 1000, 300), (900, 2000, 1))
    await pair.read((4096, 1 << 20, 20 << 20))

    assert pair.is_right(5, 1000, 300)
    assert pair.is_right(900, 2000, 1)
    assert pair.is_right(4096, 1 << 20, 20 << 20)
    touched = 300 + 1 + (20 << 20)
    assert int((pair.local != 0).sum()) <= touched
    assert not pair.local[:1000].any()
    assert not pair.local[21 << 20 :].any()


async def test_a_stopped_owner_is_read_as_well(pair: Pair) -> None:
    await pair.reader.connect("owner", pair.metadata)
    pair.owner.send_signal(signal.SIGSTOP)

    await pair.read((0, 0, 2 << 20))

    assert pair.is_right(0, 0, 2 << 20)


@pytest.mark.parametrize("size", [100, INLINE_BYTES + 1])
async def test_a_dead_owner_is_unreachable_at_once_and_forgotten(pair: Pair, size: int) -> None:
    await pair.reader.connect("owner", pair.metadata)
    pair.owner.kill()
    pair.owner.wait()

    with pytest.raises(PeerUnreachable):
        await pair.read((0, 0, size))

    assert pair.reader.num_peers == 0
    # What is left is the way through the network, where nobody is either.
    with pytest.raises(PeerUnreachable):
        await pair.reader.connect("owner", pair.metadata)


async def test_memory_of_another_process_with_the_same_id_is_not_taken_for_the_owners(pair: Pair) -> None:
    shared = SharedBuffer(4096)
    own = shared.address

    assert PeerMapping.open(own) is not None
    assert PeerMapping.open(replace(own, token="00" * 16)) is None
    assert PeerMapping.open(replace(own, namespace="elsewhere")) is None
    assert PeerMapping.open(replace(own, fd=9999)) is None
    assert PeerMapping.open(replace(own, size_bytes=1 << 30)) is None


async def test_a_peer_that_shares_nothing_is_read_through_the_other_transport() -> None:
    network = LoopbackNetwork()
    remote = torch.arange(100).to(torch.uint8)
    other = LoopbackTransport("plain", remote, network)
    shared = SharedBuffer(200)
    reader = SameHostTransport(LoopbackTransport("reader", shared.tensor, network), shared.tensor, shared)

    await reader.connect("plain", other.metadata())
    await reader.read("plain", [ByteRange(remote_offset=10, local_offset=50, size=20)], deadline_s=1)

    assert shared.tensor[50:70].tolist() == list(range(10, 30))
    assert reader.num_peers == 1
    await reader.disconnect("plain")
    assert reader.num_peers == 0


async def test_ranges_outside_either_memory_and_wrong_names_are_refused(pair: Pair) -> None:
    with pytest.raises(TransferError):
        await pair.reader.connect("somebody", pair.metadata)
    with pytest.raises(TransferError):
        await pair.reader.connect("owner", pair.metadata[:40])
    await pair.reader.connect("owner", pair.metadata)
    for source, target in ((SIZE - 64, 0), (0, SIZE), (-1, 0)):
        with pytest.raises(TransferError):
            await pair.read((source, target, 8))


async def test_a_read_that_is_late_or_cancelled_leaves_a_quiet_destination(pair: Pair) -> None:
    await pair.reader.connect("owner", pair.metadata)

    with pytest.raises(TransferTimeout) as late:
        await pair.read((0, 0, 24 << 20), deadline_s=0.0)
    reading = asyncio.create_task(pair.read((0, 0, 24 << 20)))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await reading

    for error in (late.value, cancelled.value):
        quiet = destination_free(error)
        assert quiet is None or quiet.done()


async def test_two_connects_at_once_are_one_peer(pair: Pair) -> None:
    await asyncio.gather(*(pair.reader.connect("owner", pair.metadata) for _ in range(3)))

    await pair.read((0, 0, 100))

    assert pair.is_right(0, 0, 100)
    assert pair.reader.num_peers == 1


async def test_a_peer_that_is_forgotten_or_given_up_while_it_is_mapped_leaves_no_mapping(pair: Pair) -> None:
    before = len(os.listdir("/proc/self/fd"))

    connecting = asyncio.create_task(pair.reader.connect("owner", pair.metadata))
    await asyncio.sleep(0)
    await pair.reader.disconnect("owner")
    with pytest.raises(PeerUnreachable):
        await connecting
    connecting = asyncio.create_task(pair.reader.connect("owner", pair.metadata))
    await asyncio.sleep(0)
    connecting.cancel()
    await asyncio.wait([connecting])
    await pair.reader.disconnect("owner")
    await asyncio.sleep(0.1)

    assert pair.reader.num_peers == 0
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_read_whose_deadline_and_cancellation_come_together_is_cancelled(pair: Pair) -> None:
    await pair.reader.connect("owner", pair.metadata)
    reading = asyncio.create_task(pair.read((0, 0, 24 << 20), deadline_s=0.0))
    while not reading.done():
        reading.cancel()
        await asyncio.sleep(0)

    assert reading.cancelled()


async def test_an_address_that_is_malformed_or_too_small_is_refused(pair: Pair) -> None:
    good = SharedBuffer(4096).address
    for wrong in ({"pid": "1"}, {"fd": -1}, {"size_bytes": True}, {"token": "xyz"}, {"namespace": 3}):
        with pytest.raises(TransferError):
            SharedAddress.from_bytes(replace(good, **wrong).to_bytes())  # type: ignore[arg-type]
    address = SharedAddress.from_bytes(pair.metadata[8 : pair.metadata.index(b"}") + 1])
    smaller = replace(address, size_bytes=4096).to_bytes()
    rest = pair.metadata[pair.metadata.index(b"}") + 1 :]
    with pytest.raises(TransferError, match="leaves the shared memory"):
        await pair.reader.connect("owner", pair.metadata[:4] + len(smaller).to_bytes(4, "little") + smaller + rest)


async def test_an_owner_that_ends_leaves_nothing_behind(pair: Pair) -> None:
    before = len(os.listdir("/proc/self/fd"))
    await pair.reader.connect("owner", pair.metadata)
    await pair.read((0, 0, 100))

    await pair.reader.disconnect("owner")

    assert len(os.listdir("/proc/self/fd")) == before
    assert "kvferry-arena" not in " ".join(os.listdir("/dev/shm"))  # noqa: S108 - looked at
