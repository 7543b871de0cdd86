"""No id is handed out twice, and what is lost first is the tail that was used least recently."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_store.block_allocator import BlockAllocator
from kv_store.prefix_index import PrefixIndex
from messages.errors import OutOfBlocks
from messages.handoff import BlockId, BlockKey


def keys(text: str) -> list[BlockKey]:
    return [BlockKey(character.encode()) for character in text]


def full(text: str, blocks: int) -> tuple[BlockAllocator, list[BlockId]]:
    """An allocator of a full group that holds the chain `text`, referenced."""
    allocator = BlockAllocator(blocks)
    return allocator, grow(allocator, text)


def grow(allocator: BlockAllocator, text: str, parent: BlockKey | None = None) -> list[BlockId]:
    ids = allocator.allocate(len(text))
    for block_id, key in zip(ids, keys(text), strict=True):
        allocator.keep(block_id, key, parent)
        parent = key
    return ids


def held(allocator: BlockAllocator, text: str) -> str:
    return "".join(key.decode() for key in keys(text) if allocator.index.block_of(key) is not None)


def test_fresh_ids_are_neighbours_in_order() -> None:
    assert BlockAllocator(5).allocate(3) == [0, 1, 2]


def test_allocation_takes_all_or_none_and_evicts_nothing_in_vain() -> None:
    allocator, ids = full("ab", 4)
    allocator.release(ids)
    allocator.allocate(1)

    with pytest.raises(OutOfBlocks, match=r"wanted=4, available=3"):
        allocator.allocate(4)

    assert held(allocator, "ab") == "ab"
    assert (allocator.num_free, allocator.num_cached, allocator.num_referenced) == (1, 2, 1)


def test_a_block_without_a_key_is_free_after_its_last_reference() -> None:
    allocator = BlockAllocator(2)
    ids = allocator.allocate(2)
    allocator.acquire(ids[:1])

    allocator.release(ids)
    assert (allocator.num_free, allocator.num_referenced) == (1, 1)

    allocator.release(ids[:1])
    assert allocator.num_free == 2


def test_a_block_with_a_key_stays_cached_and_can_be_acquired_again() -> None:
    allocator, ids = full("ab", 2)
    allocator.release(ids)
    assert allocator.num_cached == 2

    allocator.acquire(ids)

    assert (allocator.num_cached, allocator.num_referenced) == (0, 2)
    with pytest.raises(OutOfBlocks):
        allocator.allocate(1)


@pytest.mark.parametrize("break_it", [lambda a, i: a.release(i), lambda a, _: a.keep(BlockId(0), BlockKey(b"k"), None)])
def test_a_free_block_is_neither_released_nor_given_a_key(
    break_it: Callable[[BlockAllocator, list[BlockId]], object],
) -> None:
    allocator = BlockAllocator(1)
    ids = allocator.allocate(1)
    allocator.release(ids)

    with pytest.raises(ValueError, match="block 0"):
        break_it(allocator, ids)


def test_a_free_block_cannot_be_acquired() -> None:
    with pytest.raises(KeyError):
        BlockAllocator(1).acquire([BlockId(0)])


def test_eviction_takes_the_tail_of_a_chain_first() -> None:
    allocator, ids = full("abcd", 4)
    allocator.release(ids)

    for left in ("abc", "ab", "a", ""):
        allocator.allocate(1)
        assert held(allocator, "abcd") == left


def test_eviction_takes_the_least_recently_used_leaf() -> None:
    allocator, first = full("ab", 4)
    second = grow(allocator, "xy")
    allocator.release(second)
    allocator.release(first)
    allocator.acquire(second)
    allocator.release(second)

    allocator.allocate(2)

    assert held(allocator, "abxy") == "xy"


def test_a_predecessor_outlives_a_successor_that_was_used_later() -> None:
    allocator, ids = full("ab", 3)
    branch = grow(allocator, "c", parent=BlockKey(b"a"))
    allocator.release(ids)
    allocator.release(branch)

    allocator.allocate(1)
    assert held(allocator, "abc") == "ac"

    allocator.allocate(1)
    assert held(allocator, "abc") == "a"


def test_a_window_group_loses_the_least_recently_used_block_wherever_it_stands() -> None:
    allocator = BlockAllocator(3, PrefixIndex(block_size=16, window=16))
    ids = grow(allocator, "abc")
    allocator.release(ids[:1])
    allocator.release(ids[1:])

    allocator.allocate(1)

    assert held(allocator, "abc") == "bc"


def test_eviction_takes_the_key_away_with_the_block() -> None:
    allocator, ids = full("ab", 2)
    allocator.release(ids)

    grow(allocator, "xy")

    assert held(allocator, "abxy") == "xy"
    assert allocator.index.match(keys("ab"), 2) == 0


def test_cached_blocks_before_a_referenced_one_can_be_taken_and_its_key_goes_with_them() -> None:
    # Somebody computed "a" too, kept it private, and went on from it.
    allocator, first = full("a", 3)
    (private,) = allocator.allocate(1)
    (successor,) = grow(allocator, "b", parent=BlockKey(b"a"))
    allocator.release(first)
    assert allocator.num_available == 1

    taken = allocator.allocate(1)

    assert taken == first
    assert held(allocator, "ab") == ""
    allocator.release([private, successor])
    assert allocator.num_free == 2


def test_a_cached_leaf_that_gets_a_successor_is_a_leaf_no_more() -> None:
    allocator, first = full("a", 3)
    allocator.release(first)
    successor = grow(allocator, "b", parent=BlockKey(b"a"))
    allocator.release(successor)

    allocator.allocate(2)

    assert held(allocator, "ab") == "a"


def test_unindexing_frees_what_nobody_references_and_leaves_the_rest_in_place() -> None:
    allocator, ids = full("abc", 3)
    allocator.acquire(ids[:2])
    allocator.release(ids)
    assert allocator.num_cached == 1

    allocator.unindex(ids[1])
    allocator.unindex(ids[1])

    assert (allocator.num_free, allocator.num_cached, allocator.num_referenced) == (1, 0, 2)
    assert held(allocator, "abc") == "a"
    allocator.release(ids[:2])
    assert (allocator.num_free, allocator.num_cached) == (2, 1)


def test_a_block_whose_successors_are_forgotten_becomes_evictable() -> None:
    allocator, ids = full("ab", 2)
    allocator.release(ids)
    allocator.unindex(ids[1])

    assert sorted(allocator.allocate(2)) == sorted(ids)


def test_clear_makes_every_cached_block_free() -> None:
    allocator, ids = full("abc", 4)
    allocator.acquire(ids[:1])
    allocator.release(ids)

    allocator.clear()

    assert (allocator.num_free, allocator.num_cached, allocator.num_referenced) == (3, 0, 1)
    assert held(allocator, "abc") == "a"


def test_many_hits_without_eviction_keep_the_eviction_order_small() -> None:
    allocator, ids = full("ab", 4)
    allocator.release(ids)

    for _ in range(1000):
        allocator.acquire(ids)
        allocator.release(ids)

    assert len(allocator._leaves) < 100
    allocator.allocate(3)
    assert held(allocator, "ab") == "a"


@given(st.lists(st.tuples(st.sampled_from(["allocate", "release", "acquire"]), st.integers(0, 5)), max_size=60))
def test_ids_are_never_handed_out_twice_while_referenced(actions: list[tuple[str, int]]) -> None:
    allocator = BlockAllocator(8)
    references: list[BlockId] = []

    for action, amount in actions:
        if action == "allocate" and amount <= allocator.num_available:
            ids = allocator.allocate(amount)
            assert not set(ids) & set(references)
            references += ids
        elif action == "release":
            for _ in range(min(amount, len(references))):
                allocator.release([references.pop(amount % len(references))])
        elif action == "acquire" and references:
            block_id = references[amount % len(references)]
            allocator.acquire([block_id])
            references.append(block_id)

        assert allocator.num_referenced == len(set(references))
        assert allocator.num_free == 8 - len(set(references))
        assert all(allocator.num_references(BlockId(i)) == references.count(BlockId(i)) for i in range(8))
