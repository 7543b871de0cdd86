import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kv_store.handoff import BlockGroups
from kv_store.handoff_local import LocalHandoffOwner
from kv_store.handoff_reader import HandoffReader
from messages.errors import HandoffError, HandoffStale, HandoffUnknown, PeerUnreachable, TransferTimeout
from messages.handoff import CloseReply, Handoff, OpenReply
from tests.unit.kv_store.handoff_pair import GEOMETRY, Pair, ids, refs


@pytest.mark.parametrize("state", ["new", "open", "half read", "closed", "abandoned"])
async def test_abandon_works_from_every_state_and_frees_the_owner_at_once(state: str) -> None:
    """Rule 4, for the reader of a hand-off."""
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
    """Rule 1."""
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


async def test_a_read_that_fails_first_leaves_nothing_good() -> None:
    pair = Pair()
    reader = pair.reader(pair.grant((refs(3), refs()), 16), (ids(3), ids()))
    await reader.open()
    pair.network.kill("p-1")

    with pytest.raises(PeerUnreachable):
        await reader.read_through(16)
    with pytest.raises(HandoffStale):
        await reader.read_through(16)
    stats = await reader.close()
    await reader.abandon()

    assert (stats.good_tokens, stats.blocks) == (0, 0)
    assert pair.table.pop_freed() == ["r"]


async def test_what_was_read_before_a_failure_is_good() -> None:
    """Rule 25: truncated at the first bad block."""
    pair = Pair()
    reader = pair.reader(pair.grant((refs(3, 4, 5), refs(1, 2, 6)), 40), (ids(3, 4, 5), ids(1, 2, 6)))
    await reader.open()
    await reader.read_through(16)
    pair.network.kill("p-1")
    with pytest.raises(PeerUnreachable):
        await reader.read_through(32)

    stats = await reader.close()

    assert (stats.good_tokens, stats.blocks) == (16, 2)
    assert pair.has_block(0, 3, 3)
    assert pair.has_block(1, 1, 1)


async def test_after_a_failure_nothing_behind_a_hole_of_the_owner_is_good() -> None:
    """A window of the shorter prompt may need what the owner has no block for."""
    pair = Pair()
    reader = pair.reader(pair.grant((refs(3, 4, 5), refs(None, 2, 6)), 40), (ids(3, 4, 5), ids(1, 2, 6)))
    await reader.open()
    await reader.read_through(32)
    pair.network.kill("p-1")
    with pytest.raises(PeerUnreachable):
        await reader.read_through(40)

    assert (await reader.close()).good_tokens == 0


async def test_a_failure_with_an_ended_lease_leaves_nothing_good() -> None:
    pair = Pair(lease_s=1.0)
    reader = pair.reader(pair.grant((refs(3, 4), refs()), 32), (ids(3, 4), ids()))
    await reader.open()
    await reader.read_through(16)
    pair.network.kill("p-1")
    with pytest.raises(PeerUnreachable):
        await reader.read_through(32)
    pair.now_s = 2.0

    with pytest.raises(HandoffStale):
        await reader.close()


def test_an_owner_with_fewer_blocks_than_the_prompt_is_refused() -> None:
    """Case 23: a hand-off has all blocks or is recomputed."""
    pair = Pair()

    with pytest.raises(HandoffError, match="fewer blocks"):
        pair.reader(pair.grant((refs(3), refs()), 17), (ids(3, 4), ids()))


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

    async def close(self, handoff: Handoff, generation: int) -> CloseReply:
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
