import asyncio

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_store.huge_pages import advise_huge_pages
from kv_store.transfer.peer_memory import PeerMemory
from kv_store.transfer.protocol import ByteRange, check_ranges, cut, destination_free, mark_busy
from messages.errors import TransferError


def piece(remote: int, local: int, size: int) -> ByteRange:
    return ByteRange(remote_offset=remote, local_offset=local, size=size)


def test_ranges_inside_both_memories_add_up() -> None:
    assert check_ranges([piece(90, 0, 10), piece(0, 40, 10)], local_size=50, remote_size=100) == 20


@pytest.mark.parametrize(
    "bad", [piece(91, 0, 10), piece(0, 41, 10), piece(-1, 0, 1), piece(0, -1, 1), piece(0, 0, 0), piece(5, 5, -1)]
)
def test_a_range_that_leaves_a_memory_is_refused(bad: ByteRange) -> None:
    with pytest.raises(TransferError):
        check_ranges([bad], local_size=50, remote_size=100)


def test_ranges_that_write_the_same_bytes_are_refused() -> None:
    with pytest.raises(TransferError):
        check_ranges([piece(0, 10, 10), piece(20, 19, 10)], local_size=50, remote_size=100)


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 300)), max_size=12),
    st.integers(1, 200),
)
def test_cutting_keeps_every_byte_in_order_and_the_limit(shapes: list[tuple[int, int, int]], limit: int) -> None:
    ranges = [piece(*shape) for shape in shapes]

    groups = list(cut(ranges, limit))

    def pairs(pieces: list[ByteRange]) -> list[tuple[int, int]]:
        return [(each.remote_offset + i, each.local_offset + i) for each in pieces for i in range(each.size)]

    assert [pair for group in groups for pair in pairs(group)] == pairs(ranges)
    sizes = [sum(each.size for each in group) for group in groups]
    assert all(size == limit for size in sizes[:-1])
    assert all(0 < size <= limit for size in sizes[-1:])


@given(
    st.builds(
        PeerMemory,
        agent_name=st.text(max_size=40),
        base_address=st.integers(0, 2**64 - 1),
        size_bytes=st.integers(0, 2**64 - 1),
        is_device=st.booleans(),
        device_index=st.integers(0, 127),
        agent_metadata=st.binary(min_size=1),
    )
)
def test_the_envelope_gives_back_what_was_put_in(memory: PeerMemory) -> None:
    assert PeerMemory.from_bytes(memory.to_bytes()) == memory


@given(st.binary(max_size=64))
def test_other_bytes_are_no_envelope(data: bytes) -> None:
    with pytest.raises(TransferError):
        PeerMemory.from_bytes(data)


async def test_an_error_says_when_its_destination_is_free() -> None:
    quiet: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    error = TransferError("late")
    assert destination_free(error) is None

    mark_busy(error, quiet)

    assert destination_free(error) is quiet


async def test_a_quiet_destination_is_free_already() -> None:
    quiet: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    quiet.set_result(None)
    error = TransferError("late")

    mark_busy(error, quiet)

    assert destination_free(error) is None


def test_advising_huge_pages_keeps_the_contents() -> None:
    buffer = (torch.arange(8 << 20) % 251).to(torch.uint8)
    before = buffer.clone()

    assert advise_huge_pages(buffer.data_ptr(), buffer.numel()) in (True, False)

    assert torch.equal(buffer, before)


def test_a_small_buffer_is_left_alone() -> None:
    small = torch.zeros(4096, dtype=torch.uint8)

    assert not advise_huge_pages(small.data_ptr(), small.numel())
