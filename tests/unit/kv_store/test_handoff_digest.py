import asyncio

import pytest
import torch

from kv_store.transfer.digest import BlockDigester
from messages.errors import HandoffError, HandoffStale
from messages.handoff import BlockId
from tests.unit.kv_store.handoff_pair import BLOCK_BYTES, REMOTE_OFFSETS, DigestPair, ids, refs


def test_a_digest_depends_on_every_byte_and_on_no_other_block() -> None:
    buffer = torch.zeros(4 * 64, dtype=torch.uint8)
    digester = BlockDigester(buffer, (64,), (64,))
    before = [digester.digest(0, BlockId(number)) for number in range(3)]

    for place in (64 + 64, 64 + 64 + 31, 64 + 64 + 63):
        buffer[place] ^= 1
        after = [digester.digest(0, BlockId(number)) for number in range(3)]
        assert (after[0], after[2]) == (before[0], before[2])
        assert after[1] != before[1]
        buffer[place] ^= 1
    assert digester.digest(0, BlockId(1)) == before[1]


async def test_equal_bytes_are_good() -> None:
    pair = DigestPair()
    handoff = pair.grant((refs(5, 2, 9), refs(None, 7, 1)), 40)
    reader = pair.reader(handoff, (ids(1, 0, 3), ids(None, 5, 6)))
    await reader.open()
    await reader.read_through(16)
    await reader.read_through(40)

    stats = await reader.close()

    assert (stats.good_tokens, stats.digest_mismatches, stats.blocks) == (40, 0, 5)
    assert pair.table.pop_freed() == ["r"]


@pytest.mark.parametrize(("group", "index", "good"), [(0, 0, 0), (0, 1, 16), (1, 1, 16), (1, 2, 32), (0, 2, 32)])
async def test_the_prompt_is_good_up_to_the_first_block_with_other_bytes(group: int, index: int, good: int) -> None:
    """Rule 26 and case 34: an opt-in digest of every block."""
    pair = DigestPair()
    local = (ids(1, 0, 3), ids(4, 5, 6))
    source = (refs(5, 2, 9), refs(8, 7, 1))
    reader = pair.reader(pair.grant(source, 40), local)
    await reader.open()
    start = REMOTE_OFFSETS[group] + int(source[group][index].block_id) * BLOCK_BYTES[group]  # type: ignore[union-attr]
    right = int(pair.source[start])
    pair.source[start] ^= 1
    await reader.read_through(40)
    pair.source[start] = right

    stats = await reader.close()

    assert (stats.good_tokens, stats.digest_mismatches) == (good, 1)


async def test_blocks_that_were_not_read_are_no_mismatch() -> None:
    pair = DigestPair()
    reader = pair.reader(pair.grant((refs(3, 4), refs(1, 2)), 32), (ids(3, 4), ids(1, 2)))
    await reader.open()
    await reader.read_through(16)
    pair.network.kill("p-1")
    with pytest.raises(Exception, match="gone"):
        await reader.read_through(32)

    stats = await reader.close()

    assert (stats.good_tokens, stats.digest_mismatches) == (16, 0)


async def test_a_reader_that_compares_takes_nothing_from_an_owner_without_digests() -> None:
    pair = DigestPair(has_owner_digests=False)
    reader = pair.reader(pair.grant((refs(3), refs(1)), 16), (ids(3), ids(1)))
    await reader.open()
    await reader.read_through(16)

    with pytest.raises(HandoffError, match="no digests"):
        await reader.close()


async def test_a_lease_that_ends_while_digests_are_taken_is_not_valid() -> None:
    pair = DigestPair(lease_s=1.0)
    digest = pair.theirs.digest

    def slow(group: int, block_id: BlockId) -> int:
        pair.now_s = 2.0
        return digest(group, block_id)

    pair.owner._digest = slow
    reader = pair.reader(pair.grant((refs(3), refs(1)), 16), (ids(3), ids(1)))
    await reader.open()
    await reader.read_through(16)

    with pytest.raises(HandoffStale):
        await reader.close()
    assert pair.table.pop_freed() == ["r"]


async def test_digests_are_taken_off_the_event_loop() -> None:
    pair = DigestPair()
    threads: set[object] = set()
    digest = pair.theirs.digest

    def noted(group: int, block_id: BlockId) -> int:
        try:
            threads.add(asyncio.get_running_loop())
        except RuntimeError:
            threads.add("no loop here")
        return digest(group, block_id)

    pair.owner._digest = noted
    reader = pair.reader(pair.grant((refs(3), refs(1)), 16), (ids(3), ids(1)))
    await reader.open()
    await reader.read_through(16)
    await reader.close()

    assert threads == {"no loop here"}
