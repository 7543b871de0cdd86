"""Longest hits, with and without a window; the forest of entries; what the registry hears."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_store.prefix_index import KeyCensus, PrefixIndex
from messages.handoff import BlockId, BlockKey

A, B, X = (BlockKey(name) for name in (b"a", b"b", b"x"))


def keys(text: str) -> list[BlockKey]:
    return [BlockKey(character.encode()) for character in text]


def chain(index: PrefixIndex, text: str) -> None:
    """Index the keys of `text` one after another, in blocks from 0 on."""
    parent = None
    for block_id, key in enumerate(keys(text)):
        index.add(BlockId(block_id), key, parent)
        parent = key


def test_a_full_group_hits_up_to_the_first_missing_key() -> None:
    index = PrefixIndex(block_size=16)
    chain(index, "abc")

    assert index.match(keys("abcd"), 4) == 3
    assert index.match(keys("abcd"), 2) == 2
    assert index.match(keys("axc"), 3) == 1
    assert index.match(keys("xbc"), 3) == 0
    assert index.match([], 3) == 0


@pytest.mark.parametrize(
    ("held", "window", "length"),
    [
        ("abcdef", 32, 6),
        ("ef", 32, 6),
        ("def", 33, 6),
        ("ef", 33, 0),
        ("bcdf", 32, 4),
        ("cdf", 32, 4),
        ("adf", 32, 1),
        ("f", 16, 6),
        ("f", 17, 0),
        ("abdf", 32, 2),
        ("", 32, 0),
    ],
)
def test_a_window_group_needs_only_the_blocks_that_cover_the_window(held: str, window: int, length: int) -> None:
    index = PrefixIndex(block_size=16, window=window)
    for block_id, key in enumerate(keys(held)):
        index.add(BlockId(block_id), key, None)

    assert index.match(keys("abcdef"), 6) == length


@given(st.sets(st.integers(0, 15)), st.integers(1, 40), st.integers(0, 16))
def test_a_window_match_is_the_longest_that_every_needed_block_allows(held: set[int], window: int, limit: int) -> None:
    prompt = keys("abcdefghijklmnop")
    index = PrefixIndex(block_size=4, window=window)
    for block_id in held:
        index.add(BlockId(block_id), prompt[block_id], None)

    possible = [n for n in range(limit + 1) if all(p // 4 in held for p in range(max(0, n * 4 - window), n * 4))]

    assert index.match(prompt, limit) == max(possible)


def test_a_key_keeps_its_first_block() -> None:
    index = PrefixIndex(block_size=16)

    assert index.add(BlockId(3), A, None)
    assert not index.add(BlockId(4), A, None)
    assert index.block_of(A) == 3
    assert BlockId(4) not in index


def test_a_block_without_its_predecessor_stays_private() -> None:
    index = PrefixIndex(block_size=16)

    assert not index.add(BlockId(1), B, A)
    assert len(index) == 0


def test_a_block_has_at_most_one_key() -> None:
    index = PrefixIndex(block_size=16)
    index.add(BlockId(1), A, None)

    with pytest.raises(ValueError, match="block 1"):
        index.add(BlockId(1), B, None)


def test_removing_a_block_removes_what_follows_it_children_first() -> None:
    index = PrefixIndex(block_size=16)
    chain(index, "abc")
    index.add(BlockId(9), X, B)

    removed = index.remove(BlockId(1))

    assert removed[-1] == 1
    assert sorted(removed) == [1, 2, 9]
    assert index.match(keys("abc"), 3) == 1
    assert index.is_leaf(BlockId(0))


def test_only_the_end_of_a_chain_is_a_leaf() -> None:
    index = PrefixIndex(block_size=16)
    chain(index, "ab")

    assert not index.is_leaf(BlockId(0))
    assert index.is_leaf(BlockId(1))
    assert not index.is_leaf(BlockId(7))
    assert index.parent_of(BlockId(1)) == 0
    assert index.parent_of(BlockId(0)) is None


def test_in_a_window_group_every_entry_is_a_leaf() -> None:
    index = PrefixIndex(block_size=16, window=32)
    chain(index, "ab")

    assert index.is_leaf(BlockId(0))
    assert index.remove(BlockId(0)) == [0]
    assert index.block_of(B) == 1


def test_a_key_is_stored_when_every_group_holds_it_and_removed_with_the_first_that_loses_it() -> None:
    census = KeyCensus(2)

    census.add(A)
    assert census.take().stored == []

    census.add(A)
    assert census.take().stored == [A]

    census.discard(A)
    assert census.take().removed == [A]

    census.discard(A)
    changes = census.take()
    assert (changes.stored, changes.removed) == ([], [])


def test_what_comes_and_goes_between_two_reports_is_not_reported() -> None:
    census = KeyCensus(1)
    census.add(A)
    census.take()

    census.add(B)
    census.discard(B)
    census.discard(A)
    census.add(A)

    changes = census.take()
    assert (changes.stored, changes.removed) == ([], [])
