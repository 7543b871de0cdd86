import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from messages.errors import HandoffError, HandoffStale
from tests.unit.kv_store.handoff_pair import Pair, ids, refs


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
    handoff = pair.grant((refs(3, 4, 8), refs(1, 2)), 20)
    reader = pair.reader(handoff, (ids(1, 2, 3, 4), ids(5, 6, 7)))

    await reader.open()
    await reader.read_through(20)

    assert (await reader.close()).blocks == 4


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
    """Cases 36 and 37."""
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
    """Rules 1 and 2; case 8."""
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
    """Rule 1: bytes of generation g-1 are refused."""
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
    """Rule 3."""
    pair = Pair(lease_s=0.060)
    reader = pair.reader(pair.grant((refs(3), refs()), 16), (ids(3), ids()))
    await reader.open()
    for _ in range(8):
        await asyncio.sleep(0.015)
        pair.now_s += 0.015
        assert pair.table.expire(pair.now_s) == []

    await reader.read_through(16)

    assert (await reader.close()).blocks == 1


@pytest.mark.parametrize("owner_now_s", [-1e9, 0.0, 1e9])
async def test_owner_and_reader_need_not_agree_on_the_time(owner_now_s: float) -> None:
    """Rule 3: a lease is a duration on the clock of whoever looks at it."""
    pair = Pair(lease_s=30.0)
    pair.now_s = owner_now_s
    reader = pair.reader(pair.grant((refs(3), refs()), 16), (ids(3), ids()))
    await reader.open()
    pair.now_s += 29.0
    await reader.read_through(16)

    assert (await reader.close()).blocks == 1
    late = pair.reader(pair.grant((refs(3), refs()), 16), (ids(3), ids()))
    await late.open()
    pair.now_s += 30.0
    await late.read_through(16)
    with pytest.raises(HandoffStale):
        await late.close()


async def test_a_fenced_reader_learns_it_from_its_heartbeat() -> None:
    pair = Pair(lease_s=0.030)
    reader = pair.reader(pair.grant((refs(3), refs()), 16), (ids(3), ids()))
    await reader.open()
    pair.now_s = 1.0
    await asyncio.sleep(0.030)

    with pytest.raises(HandoffStale):
        await reader.read_through(16)

    assert pair.transport.reads == []


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is over must go at once: in a process with many objects a full collection comes once in many minutes."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("is_closed", [True, False])
async def test_a_reader_that_is_over_leaves_no_garbage(*, is_closed: bool) -> None:
    """It holds the whole hand-off: a worker that reads would grow with every request."""
    pair = Pair()
    reader = pair.reader(pair.grant((refs(5, 2), refs(8, 7)), 32), (ids(1, 0), ids(4, 5)))
    await reader.open()
    # Its heartbeat has begun to wait.
    await asyncio.sleep(0)
    await reader.read_through(32)
    if is_closed:
        await reader.close()
    await reader.abandon()

    left = weakref.ref(reader)
    del reader

    assert left() is None
