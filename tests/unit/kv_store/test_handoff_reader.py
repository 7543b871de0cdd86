import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest
import torch

from kv_store.handoff import BlockGroups, HandoffTable
from kv_store.handoff_local import LocalHandoffOwner
from kv_store.handoff_reader import ArenaGeometry, HandoffReader, LocalGroups
from kv_store.transfer.loopback import LoopbackNetwork, LoopbackTransport
from kv_store.transfer.protocol import ByteRange
from messages.errors import HandoffError, HandoffStale, HandoffUnknown, PeerUnreachable, TransferTimeout
from messages.handoff import BlockId, BlockKey, BlockRef, Handoff, OpenReply
from messages.requests import RequestId

BLOCK_BYTES = (64, 48)
REMOTE_OFFSETS = (0, 1024)
LOCAL_OFFSETS = (256, 2048)
GEOMETRY = ArenaGeometry(group_offsets=LOCAL_OFFSETS, block_bytes=BLOCK_BYTES, block_size=16)
SIZE = 4096


class RecordingTransport(LoopbackTransport):
    """Remembers what was asked of it."""

    def __init__(self, name: str, buffer: torch.Tensor, network: LoopbackNetwork) -> None:
        super().__init__(name, buffer, network, connect_timeout_s=0.2)
        self.reads: list[list[ByteRange]] = []

    async def read(self, agent_name: str, ranges: Sequence[ByteRange], *, deadline_s: float) -> int:
        self.reads.append(list(ranges))
        return await super().read(agent_name, ranges, deadline_s=deadline_s)


class Pair:
    """A prefill and a decode worker in one process, on a clock that the test turns."""

    def __init__(self, lease_s: float = 30.0) -> None:
        self.now_s = 0.0
        self.network = LoopbackNetwork()
        self.source = (torch.arange(SIZE) % 251).to(torch.uint8)
        self.local = torch.full((SIZE,), 255, dtype=torch.uint8)
        self.table = HandoffTable(worker_id="p", incarnation="1", address="a", fingerprint="f", lease_s=lease_s)
        owner_side = LoopbackTransport("p-1", self.source, self.network)
        self.owner = LocalHandoffOwner(self.table, owner_side, REMOTE_OFFSETS, lambda: self.now_s)
        self.transport = RecordingTransport("d-1", self.local, self.network)

    def grant(self, groups: BlockGroups, num_tokens: int, request_id: str = "r") -> Handoff:
        return self.table.grant(RequestId(request_id), groups, num_tokens, self.now_s)

    def reader(self, handoff: Handoff, local: LocalGroups, deadline_s: float = 5.0) -> HandoffReader:
        return HandoffReader(handoff, self.owner, self.transport, GEOMETRY, local, deadline_s)

    def has_block(self, group: int, remote_id: int, local_id: int) -> bool:
        size = BLOCK_BYTES[group]
        start, end = REMOTE_OFFSETS[group] + remote_id * size, LOCAL_OFFSETS[group] + local_id * size
        return torch.equal(self.source[start : start + size], self.local[end : end + size])

    @property
    def num_written(self) -> int:
        return int((self.local != 255).sum())


def refs(*ids: int | None) -> tuple[BlockRef | None, ...]:
    return tuple(
        None if number is None else BlockRef(block_id=BlockId(number), key=BlockKey(bytes([number]))) for number in ids
    )


def ids(*numbers: int | None) -> tuple[BlockId | None, ...]:
    return tuple(None if number is None else BlockId(number) for number in numbers)


async def test_blocks_of_every_group_arrive_where_they_are_wanted() -> None:
    pair = Pair()
    handoff = pair.grant((refs(5, 2, 9), refs(None, 7, 1)), 40)
    reader = pair.reader(handoff, (ids(1, 0, 3), ids(4, 5, 6)))

    await reader.open()
    await reader.read_through(40)
    stats = await reader.close()

    assert all(pair.has_block(0, *blocks) for blocks in ((5, 1), (2, 0), (9, 3)))
    assert all(pair.has_block(1, *blocks) for blocks in ((7, 5), (1, 6)))
    assert pair.num_written <= 3 * 64 + 2 * 48
    assert (stats.blocks, stats.size_bytes) == (5, 3 * 64 + 2 * 48)
    assert stats.seconds > 0
    assert pair.table.pop_freed() == ["r"]


async def test_reads_follow_the_prefill_and_never_repeat_a_block() -> None:
    pair = Pair()
    handoff = pair.grant((refs(0, 1, 2), refs()), 40)
    reader = pair.reader(handoff, (ids(4, 6, 8), ids()))
    await reader.open()

    for complete_tokens, num_reads in ((0, 0), (15, 0), (16, 1), (31, 1), (32, 2), (39, 2), (40, 3), (40, 3)):
        await reader.read_through(complete_tokens)
        assert len(pair.transport.reads) == num_reads

    assert [[piece.remote_offset for piece in read] for read in pair.transport.reads] == [[0], [64], [128]]
    assert (await reader.close()).blocks == 3


async def test_neighbours_on_both_sides_are_one_range_and_others_are_not() -> None:
    pair = Pair()
    handoff = pair.grant((refs(3, 4, 5, 9, 1), refs()), 80)
    reader = pair.reader(handoff, (ids(6, 7, 8, 9, 2), ids()))

    await reader.open()
    await reader.read_through(80)

    sizes = [(piece.remote_offset, piece.local_offset, piece.size) for piece in pair.transport.reads[0]]
    assert sizes == [
        (3 * 64, 256 + 6 * 64, 3 * 64),
        (9 * 64, 256 + 9 * 64, 64),
        (1 * 64, 256 + 2 * 64, 64),
    ]


async def test_blocks_held_already_and_holes_are_neither_asked_for_nor_read() -> None:
    pair = Pair()
    handoff = pair.grant((refs(3, 4, None), refs(1, 2, 3)), 48)
    reader = pair.reader(handoff, (ids(None, 5, 6), ids(None, None, 9)))

    await reader.open()
    await reader.read_through(48)
    stats = await reader.close()

    assert stats.blocks == 2
    assert pair.has_block(0, 4, 5)
    assert pair.has_block(1, 3, 9)


async def test_room_beyond_the_prompt_is_not_read() -> None:
    pair = Pair()
    handoff = pair.grant((refs(3, 4, 8), refs(1)), 20)
    reader = pair.reader(handoff, (ids(1, 2, 3, 4), ids(5, 6)))

    await reader.open()
    await reader.read_through(20)

    assert (await reader.close()).blocks == 3


async def test_a_handoff_of_which_nothing_is_wanted_closes_without_a_read() -> None:
    pair = Pair()
    handoff = pair.grant((refs(3), refs(1)), 16)
    reader = pair.reader(handoff, (ids(None), ids(None)))

    await reader.open()
    await reader.read_through(16)

    assert (await reader.close()).blocks == 0
    assert pair.transport.reads == []


async def test_closing_before_everything_was_read_is_refused() -> None:
    pair = Pair()
    handoff = pair.grant((refs(3, 4), refs()), 32)
    reader = pair.reader(handoff, (ids(3, 4), ids()))
    await reader.open()
    await reader.read_through(16)

    with pytest.raises(HandoffError):
        await reader.close()

    await reader.abandon()
    assert pair.table.pop_freed() == ["r"]


async def test_a_read_slower_than_a_lease_of_50_ms_is_stale_and_the_next_grant_works() -> None:
    pair = Pair(lease_s=0.050)
    late = pair.reader(pair.grant((refs(3), refs()), 16), (ids(3), ids()))
    await late.open()
    await late.read_through(16)
    pair.now_s = 0.100

    with pytest.raises(HandoffStale):
        await late.close()

    assert pair.table.pop_freed() == ["r"]
    again = pair.reader(pair.grant((refs(3), refs()), 16), (ids(3), ids()))
    await again.open()
    await again.read_through(16)
    assert (await again.close()).blocks == 1


async def test_bytes_of_a_reassigned_block_are_never_called_valid() -> None:
    pair = Pair(lease_s=0.050)
    reader = pair.reader(pair.grant((refs(3), refs()), 16), (ids(3), ids()))
    await reader.open()
    pair.now_s = 0.060
    pair.table.expire(pair.now_s)
    pair.source.fill_(9)
    await reader.read_through(16)

    with pytest.raises(HandoffStale):
        await reader.close()


async def test_a_second_attempt_makes_the_first_stale() -> None:
    pair = Pair()
    handoff = pair.grant((refs(3), refs()), 16)
    first, second = (pair.reader(handoff, (ids(number), ids())) for number in (1, 2))
    await first.open()
    await second.open()
    await first.read_through(16)
    await second.read_through(16)

    with pytest.raises(HandoffStale):
        await first.close()

    assert pair.table.pop_freed() == []
    assert (await second.close()).blocks == 1


async def test_heartbeats_keep_the_lease_during_a_long_prefill() -> None:
    pair = Pair(lease_s=0.060)
    reader = pair.reader(pair.grant((refs(3), refs()), 16), (ids(3), ids()))
    await reader.open()
    for _ in range(8):
        await asyncio.sleep(0.015)
        pair.now_s += 0.015
        assert pair.table.expire(pair.now_s) == []

    await reader.read_through(16)

    assert (await reader.close()).blocks == 1


async def test_a_fenced_reader_learns_it_from_its_heartbeat() -> None:
    pair = Pair(lease_s=0.030)
    reader = pair.reader(pair.grant((refs(3), refs()), 16), (ids(3), ids()))
    await reader.open()
    pair.now_s = 1.0
    await asyncio.sleep(0.030)

    with pytest.raises(HandoffStale):
        await reader.read_through(16)

    assert pair.transport.reads == []


@pytest.mark.parametrize("state", ["new", "open", "half read", "closed", "abandoned"])
async def test_abandon_works_from_every_state_and_frees_the_owner_at_once(state: str) -> None:
    pair = Pair()
    reader = pair.reader(pair.grant((refs(3, 4), refs()), 32), (ids(3, 4), ids()))
    steps: dict[str, list[Callable[[], Awaitable[object]]]] = {
        "new": [],
        "open": [reader.open],
        "half read": [reader.open, lambda: reader.read_through(16)],
        "closed": [reader.open, lambda: reader.read_through(32), reader.close],
        "abandoned": [reader.open, reader.abandon],
    }
    for step in steps[state]:
        await step()

    await reader.abandon()

    assert pair.table.pop_freed() == ["r"]
    assert reader.is_quiet()
    with pytest.raises(HandoffError):
        await reader.read_through(32)


async def test_a_timed_out_read_is_abandoned_only_when_its_destination_is_quiet() -> None:
    pair = Pair()
    reader = pair.reader(pair.grant((refs(3), refs()), 16), (ids(3), ids()), deadline_s=0.02)
    await reader.open()
    pair.network.stop("p-1")

    with pytest.raises(TransferTimeout):
        await reader.read_through(16)
    leaving = asyncio.create_task(reader.abandon())
    await asyncio.sleep(0.005)
    assert pair.table.pop_freed() == ["r"]
    assert not reader.is_quiet()
    assert not leaving.done()

    pair.network.resume("p-1")
    await leaving
    assert reader.is_quiet()
    pair.local.fill_(255)
    await asyncio.sleep(0.01)
    assert pair.num_written == 0


async def test_a_failed_read_can_not_be_closed_as_valid() -> None:
    pair = Pair()
    reader = pair.reader(pair.grant((refs(3), refs()), 16), (ids(3), ids()))
    await reader.open()
    pair.network.kill("p-1")

    with pytest.raises(PeerUnreachable):
        await reader.read_through(16)
    with pytest.raises(HandoffStale):
        await reader.close()
    await reader.abandon()

    assert pair.table.pop_freed() == ["r"]


async def test_cancelling_in_the_middle_of_a_read_then_abandoning_waits_for_the_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kv_store.transfer.loopback.CANCEL_WAIT_S", 0.01)
    pair = Pair()
    reader = pair.reader(pair.grant((refs(3), refs()), 16), (ids(3), ids()))
    await reader.open()
    pair.network.stop("p-1")
    read = asyncio.create_task(reader.read_through(16))
    await asyncio.sleep(0.005)
    read.cancel()
    await asyncio.wait([read])

    assert read.cancelled()
    assert not reader.is_quiet()

    asyncio.get_running_loop().call_later(0.02, pair.network.resume, "p-1")
    await reader.abandon()
    assert reader.is_quiet()
    assert pair.table.pop_freed() == ["r"]


async def test_a_cancelled_abandon_can_be_awaited_again() -> None:
    pair = Pair()
    reader = pair.reader(pair.grant((refs(3), refs()), 16), (ids(3), ids()), deadline_s=0.01)
    await reader.open()
    pair.network.stop("p-1")
    with pytest.raises(TransferTimeout):
        await reader.read_through(16)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.abandon(), 0.01)

    pair.network.resume("p-1")
    await reader.abandon()

    assert reader.is_quiet()


async def test_leaving_the_context_early_frees_the_owner() -> None:
    pair = Pair()

    with pytest.raises(ZeroDivisionError):
        async with pair.reader(pair.grant((refs(3), refs()), 16), (ids(3), ids())):
            raise ZeroDivisionError

    assert pair.table.pop_freed() == ["r"]


async def test_a_reader_of_an_unreachable_memory_fails_at_open_and_frees_the_owner() -> None:
    pair = Pair()
    reader = pair.reader(pair.grant((refs(3), refs()), 16), (ids(3), ids()))
    pair.network.kill("p-1")

    with pytest.raises(PeerUnreachable):
        await reader.open()
    await reader.abandon()

    assert pair.table.pop_freed() == ["r"]


async def test_an_owner_that_forgot_the_handoff_refuses_at_open() -> None:
    pair = Pair()
    handoff = pair.grant((refs(3), refs()), 16)
    pair.table.release(handoff.handoff_id, "1", 0.0)

    with pytest.raises(HandoffUnknown):
        await pair.reader(handoff, (ids(3), ids())).open()


async def test_groups_that_do_not_match_are_refused() -> None:
    pair = Pair()

    with pytest.raises(HandoffError):
        pair.reader(pair.grant((refs(3), refs()), 16), (ids(3),))


async def test_calls_out_of_order_are_refused() -> None:
    pair = Pair()
    reader = pair.reader(pair.grant((refs(3), refs()), 16), (ids(3), ids()))

    with pytest.raises(HandoffError):
        await reader.read_through(16)
    with pytest.raises(HandoffError):
        await reader.close()
    await reader.open()
    with pytest.raises(HandoffError):
        await reader.open()
    await reader.abandon()


class SilentOwner:
    """An owner whose network has gone: it opened once, then every call fails."""

    def __init__(self, inner: LocalHandoffOwner) -> None:
        self._inner = inner

    async def open(self, handoff: Handoff, groups: BlockGroups) -> OpenReply:
        return await self._inner.open(handoff, groups)

    async def heartbeat(self, handoff: Handoff, generation: int) -> bool:
        raise PeerUnreachable("no answer", handoff_id=handoff.handoff_id, generation=generation)

    async def close(self, handoff: Handoff, generation: int) -> bool:
        raise PeerUnreachable("no answer", handoff_id=handoff.handoff_id, generation=generation)

    async def release(self, handoff: Handoff, reason: str) -> None:
        raise PeerUnreachable("no answer", handoff_id=handoff.handoff_id, reason=reason)


async def test_an_owner_that_stops_answering_leaves_the_reader_free_and_its_own_lease_ends() -> None:
    pair = Pair(lease_s=0.030)
    reader = HandoffReader(
        pair.grant((refs(3), refs()), 16), SilentOwner(pair.owner), pair.transport, GEOMETRY, (ids(3), ids()), 5.0
    )
    await reader.open()
    await asyncio.sleep(0.015)
    await reader.read_through(16)

    with pytest.raises(PeerUnreachable):
        await reader.close()
    await reader.abandon()

    assert reader.is_quiet()
    assert pair.table.expire(0.031) == ["r"]
