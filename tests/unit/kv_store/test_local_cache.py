"""Hits, room and giving back over several KV groups at once."""

import time

import pytest

from kv_store.layout import BlockLayout, KvGroup
from kv_store.local_cache import LocalCache
from messages.errors import OutOfBlocks
from messages.handoff import BlockKey

SIZE = 4


def keys(text: str) -> list[BlockKey]:
    return [BlockKey(character.encode()) for character in text]


def cache(*num_blocks: int, window: int | None = None) -> LocalCache:
    """A cache with one full group and, with a window, a second group that slides."""
    groups = [KvGroup(name="full", layers=(0,), num_kv_heads=1, k_dim=1, v_dim=1)]
    if window is not None:
        groups.append(KvGroup(name="window", layers=(1,), num_kv_heads=1, k_dim=1, v_dim=1, window=window))
    layout = BlockLayout(groups=tuple(groups), block_size=SIZE, model_digest="m")
    return LocalCache(layout, num_blocks)


def figures(made: LocalCache) -> list[tuple[int, int, int]]:
    return [(group.free, group.cached, group.referenced) for group in made.counts()]


def remember(made: LocalCache, text: str) -> None:
    """Run a request through whose full blocks have the keys of `text`, and drop it."""
    table = made.open_table([], 0)
    made.extend(table, SIZE * len(text))
    made.mark_valid(table, SIZE * len(text), keys(text))
    made.drop(table)


@pytest.mark.parametrize(
    ("num_tokens", "cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (99, 12)]
)
def test_a_hit_is_whole_blocks_and_leaves_a_token_to_compute(num_tokens: int, cached: int) -> None:
    made = cache(8)
    remember(made, "abc")

    assert made.match(keys("abc")[: num_tokens // SIZE], num_tokens) == cached


@pytest.mark.parametrize(("written", "cached"), [(64, 48), (63, 48), (65, 64)])
def test_the_second_turn_finds_what_the_first_one_wrote(written: int, cached: int) -> None:
    # The last sampled token is never run, so a request of n tokens leaves KV for n - 1.
    layout = BlockLayout(
        groups=(KvGroup(name="full", layers=(0,), num_kv_heads=1, k_dim=1, v_dim=1),), block_size=16, model_digest="m"
    )
    made = LocalCache(layout, (10,))
    table = made.open_table([], 0)
    made.extend(table, written - 1)
    made.mark_valid(table, written - 1, keys("abcd"))
    made.drop(table)

    assert made.match(keys("abcde"), 90) == cached


def test_a_match_has_no_side_effects() -> None:
    made = cache(3)
    remember(made, "a")
    remember(made, "b")
    before = figures(made)

    assert made.match(keys("a"), 9) == SIZE

    assert figures(made) == before
    made.extend(made.open_table([], 0), 2 * SIZE)
    assert made.match(keys("a"), 9) == 0
    assert made.match(keys("b"), 9) == SIZE


def test_a_table_shares_the_blocks_of_its_hit_and_drop_gives_them_back() -> None:
    made = cache(8)
    remember(made, "ab")

    first = made.open_table(keys("ab"), 2 * SIZE)
    second = made.open_table(keys("ab"), SIZE)

    assert first.num_valid == 2 * SIZE
    assert made.block_ids(first)[0][:1] == made.block_ids(second)[0]
    assert figures(made) == [(6, 0, 2)]
    made.drop(first)
    assert figures(made) == [(6, 1, 1)]
    made.drop(second)
    assert figures(made) == [(6, 2, 0)]


def test_drop_is_idempotent_and_leaves_an_empty_table() -> None:
    made = cache(4)
    table = made.open_table([], 0)
    made.extend(table, 9)
    made.mark_valid(table, 9, [])

    made.drop(table)
    made.drop(table)

    assert figures(made) == [(4, 0, 0)]
    assert (table.capacity, table.num_valid, made.block_ids(table)) == (0, 0, ((),))


def test_a_stale_hit_is_refused_and_references_nothing() -> None:
    made = cache(3, 3, window=SIZE)
    remember(made, "ab")
    made.extend(made.open_table([], 0), 2 * SIZE)
    before = figures(made)

    with pytest.raises(LookupError, match="match again"):
        made.open_table(keys("ab"), 2 * SIZE)

    assert figures(made) == before


@pytest.mark.parametrize("num_cached", [3, 12])
def test_a_hit_that_is_not_whole_blocks_with_keys_is_refused(num_cached: int) -> None:
    made = cache(8)
    remember(made, "ab")

    with pytest.raises(LookupError, match="whole blocks"):
        made.open_table(keys("ab"), num_cached)


def test_room_is_given_in_all_groups_or_in_none() -> None:
    made = cache(8, 2, window=SIZE)
    remember(made, "a")
    table = made.open_table([], 0)
    made.extend(table, SIZE)
    before, ids = figures(made), made.block_ids(table)

    with pytest.raises(OutOfBlocks, match="group=window"):
        made.extend(table, 4 * SIZE)

    assert figures(made) == before
    assert made.block_ids(table) is ids
    assert made.match(keys("a"), 9) == SIZE


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_room_is_counted_in_started_blocks(num_tokens: int, num_blocks: int) -> None:
    made = cache(4)
    table = made.open_table([], 0)

    made.extend(table, num_tokens)
    made.extend(table, num_tokens)
    made.extend(table, 1 if num_tokens else 0)

    assert figures(made) == [(4 - num_blocks, 0, num_blocks)]


def test_eviction_makes_a_recycled_block_a_miss() -> None:
    made = cache(4)
    remember(made, "abcd")
    assert made.match(keys("abcd"), 99) == 4 * SIZE

    remember(made, "wxyz")

    assert made.match(keys("abcd"), 99) == 0
    assert made.match(keys("wxyz"), 99) == 4 * SIZE


def test_only_full_valid_blocks_can_be_hit() -> None:
    made = cache(4)
    table = made.open_table([], 0)
    made.extend(table, 3 * SIZE)

    made.mark_valid(table, 2 * SIZE - 1, keys("abc"))
    assert made.match(keys("abc"), 99) == SIZE

    made.mark_valid(table, 2 * SIZE, keys("abc"))
    assert made.match(keys("abc"), 99) == 2 * SIZE


def test_a_block_whose_key_comes_late_is_indexed_late() -> None:
    made = cache(4)
    table = made.open_table([], 0)
    made.extend(table, 2 * SIZE)
    made.mark_valid(table, 2 * SIZE, keys("a"))
    assert made.match(keys("ab"), 99) == SIZE

    made.mark_valid(table, 2 * SIZE, keys("ab"))

    assert made.match(keys("ab"), 99) == 2 * SIZE


def test_the_first_of_two_equal_blocks_is_the_one_that_is_hit() -> None:
    made = cache(8)
    tables = [made.open_table([], 0) for _ in range(2)]
    for table in tables:
        made.extend(table, SIZE)
        made.mark_valid(table, SIZE, keys("a"))

    hit = made.open_table(keys("a"), SIZE)

    assert made.block_ids(hit) == made.block_ids(tables[0])
    for table in (*tables, hit):
        made.drop(table)
    assert figures(made) == [(7, 1, 0)]


def test_marking_fewer_tokens_or_more_than_fit_is_refused() -> None:
    made = cache(4)
    table = made.open_table([], 0)
    made.extend(table, 8)
    made.mark_valid(table, 5, [])

    with pytest.raises(ValueError, match="5 tokens"):
        made.mark_valid(table, 4, [])
    with pytest.raises(ValueError, match="9 tokens"):
        made.mark_valid(table, 9, [])
    assert table.num_valid == 5


def test_a_window_gives_back_what_no_later_token_sees() -> None:
    made = cache(8, 8, window=6)
    table = made.open_table([], 0)
    made.extend(table, 16)
    made.mark_valid(table, 13, keys("abc"))

    made.slide(table, 9)
    assert figures(made)[1] == (4, 0, 4)

    made.slide(table, 13)
    made.slide(table, 13)
    assert figures(made) == [(4, 0, 4), (4, 1, 3)]
    assert made.block_ids(table)[1][0] is None


def test_a_hit_in_a_window_group_has_holes_before_the_window() -> None:
    made = cache(8, 8, window=SIZE + 1)
    remember(made, "abcd")

    table = made.open_table(keys("abcd"), 3 * SIZE)

    full, window = made.block_ids(table)
    assert None not in full
    assert [block_id is None for block_id in window] == [True, False, False]
    assert figures(made) == [(4, 1, 3), (4, 2, 2)]


def test_a_hit_is_as_long_as_all_groups_allow() -> None:
    made = cache(9, 4, window=2 * SIZE)
    remember(made, "abcd")
    table = made.open_table(keys("abcd"), 4 * SIZE)
    made.drop(table)
    # The window group loses its least recently used block: "b", then "a"; then "d", the tail of the last drop.
    other = made.open_table([], 0)
    made.extend(other, SIZE)
    assert made.match(keys("abcd"), 99) == 4 * SIZE

    made.extend(other, 3 * SIZE)

    assert made.match(keys("abcd"), 99) == 0


def test_room_before_the_window_of_computed_tokens_needs_no_blocks() -> None:
    made = cache(8, 2, window=SIZE)
    table = made.open_table([], 0)

    made.extend(table, 21, num_computed=20)

    full, window = made.block_ids(table)
    assert len(full) == len(window) == 6
    assert [block_id is None for block_id in window] == [True] * 4 + [False] * 2


@pytest.mark.parametrize(
    ("num_tokens", "left", "num_blocks"), [(11, 11, 3), (9, 9, 3), (8, 8, 2), (7, 4, 1), (3, 0, 0)]
)
def test_a_cut_through_a_full_block_gives_it_back_whole(num_tokens: int, left: int, num_blocks: int) -> None:
    made = cache(8)
    table = made.open_table([], 0)
    made.extend(table, 20)
    made.mark_valid(table, 11, keys("ab"))

    assert made.truncate(table, num_tokens) == left

    assert table.num_valid == left
    cached = max(0, 2 - num_blocks)
    assert figures(made) == [(8 - cached - num_blocks, cached, num_blocks)]


def test_a_cut_never_makes_a_shared_block_writable() -> None:
    made = cache(8)
    remember(made, "ab")
    table = made.open_table(keys("ab"), 2 * SIZE)
    shared = made.block_ids(table)[0][1]

    made.truncate(table, 2 * SIZE - 1)
    made.extend(table, 2 * SIZE)

    assert made.block_ids(table)[0][1] != shared
    assert made.match(keys("ab"), 99) == 2 * SIZE


def test_a_cut_behind_which_the_window_is_gone_starts_over() -> None:
    made = cache(8, 8, window=SIZE)
    table = made.open_table([], 0)
    made.extend(table, 5 * SIZE)
    made.mark_valid(table, 5 * SIZE, [])
    made.slide(table, 5 * SIZE)

    assert made.truncate(table, 2 * SIZE) == 0

    assert figures(made) == [(8, 0, 0), (8, 0, 0)]


def test_bad_blocks_can_be_hit_no_more_nor_what_follows_them() -> None:
    made = cache(8)
    remember(made, "abc")
    table = made.open_table(keys("abc"), 2 * SIZE)

    made.forget(table, SIZE + 1)

    assert made.match(keys("abc"), 99) == SIZE
    assert table.num_valid == SIZE
    assert figures(made) == [(6, 0, 2)]


def test_blocks_that_were_bad_are_cached_again_once_recomputed() -> None:
    made = cache(8)
    table = made.open_table([], 0)
    made.extend(table, 3 * SIZE)
    made.mark_valid(table, 3 * SIZE, keys("abc"))

    made.forget(table, SIZE)
    made.truncate(table, table.num_valid)
    made.extend(table, 3 * SIZE)
    made.mark_valid(table, 3 * SIZE, keys("abc"))

    assert made.match(keys("abc"), 99) == 3 * SIZE


def test_forgetting_behind_a_slid_window_leaves_nothing_valid() -> None:
    made = cache(8, 8, window=SIZE)
    table = made.open_table([], 0)
    made.extend(table, 4 * SIZE)
    made.mark_valid(table, 4 * SIZE, [])
    made.slide(table, 4 * SIZE)

    made.forget(table, 2 * SIZE)

    assert table.num_valid == 0


def test_changes_name_keys_that_every_group_holds() -> None:
    made = cache(8, 2, window=2 * SIZE)
    remember(made, "ab")
    changes = made.take_changes()
    assert (changes.stored, changes.removed) == (keys("ab"), [])

    made.extend(made.open_table([], 0), SIZE)
    changes = made.take_changes()
    assert (changes.stored, changes.removed) == ([], keys("b"))

    made.clear()
    assert made.take_changes().removed == keys("a")
    assert made.take_changes().removed == []


def test_clear_leaves_what_is_in_use() -> None:
    made = cache(8)
    remember(made, "abc")
    table = made.open_table(keys("abc"), SIZE)

    made.clear()

    assert made.match(keys("abc"), 99) == SIZE
    assert figures(made) == [(7, 0, 1)]
    assert table.num_valid == SIZE


def test_a_decode_step_costs_the_same_for_a_long_context() -> None:
    def step_s(num_blocks: int) -> float:
        made = cache(num_blocks + 1, num_blocks + 1, window=8 * SIZE)
        table = made.open_table([], 0)
        made.extend(table, num_blocks * SIZE)
        names = [BlockKey(i.to_bytes(4)) for i in range(num_blocks)]
        made.mark_valid(table, num_blocks * SIZE - 3, names)
        made.slide(table, num_blocks * SIZE - 3)
        best = 1.0
        for _ in range(20):
            started = time.perf_counter()
            for _ in range(10):
                made.extend(table, num_blocks * SIZE)
                made.mark_valid(table, num_blocks * SIZE - 3, names)
                made.slide(table, num_blocks * SIZE - 3)
                made.block_ids(table)
            best = min(best, time.perf_counter() - started)
        return best

    assert step_s(5000) < 5 * step_s(10)
