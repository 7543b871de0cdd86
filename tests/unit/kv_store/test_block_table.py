"""Places, holes, valid counts; what each change gives back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_store.block_table import BlockIds, BlockTable
from messages.handoff import BlockId


def places(*ids: int | None) -> BlockIds:
    return tuple(None if block_id is None else BlockId(block_id) for block_id in ids)


def table(*groups: list[int | None] | list[int], num_valid: int = 0) -> BlockTable:
    made = BlockTable(num_groups=len(groups), block_size=4)
    for number, ids in enumerate(groups):
        made.append(number, places(*ids))
    made.set_valid(num_valid)
    return made


def test_entries_carry_first_position_and_valid_count() -> None:
    entries = table([7, None, 9, 5], num_valid=9).entries(0)

    assert [(e.block_id, e.first_position, e.num_valid) for e in entries] == [
        (7, 0, 4),
        (None, 4, 0),
        (9, 8, 1),
        (5, 12, 0),
    ]


@pytest.mark.parametrize(("num_tokens", "last_valid"), [(1, 1), (31, 31), (32, 32)])
def test_the_last_block_of_a_prompt_counts_its_tokens(num_tokens: int, last_valid: int) -> None:
    made = BlockTable(num_groups=1, block_size=32)
    made.append(0, places(0))

    made.set_valid(num_tokens)

    assert made.entries(0)[-1].num_valid == last_valid


def test_capacity_is_that_of_the_shortest_group() -> None:
    assert table([1, 2, 3], [1, 2]).capacity == 8
    assert BlockTable(num_groups=2, block_size=4).capacity == 0


@pytest.mark.parametrize("num_tokens", [-1, 9])
def test_more_valid_tokens_than_room_are_refused(num_tokens: int) -> None:
    made = table([1, 2], num_valid=3)

    with pytest.raises(ValueError, match="8"):
        made.set_valid(num_tokens)

    assert made.num_valid == 3


def test_ids_are_the_same_object_until_the_table_changes() -> None:
    made = table([1, 2], [None, 4])
    ids = made.all_block_ids()

    made.set_valid(5)
    assert ids == ((1, 2), (None, 4))
    assert made.all_block_ids() is ids
    assert made.block_ids(1) is ids[1]

    made.append(0, places(3))
    assert made.block_ids(0) == (1, 2, 3)
    made.free_before(0, 4)
    assert made.block_ids(0) == (None, 2, 3)
    made.truncate(8)
    assert made.block_ids(0) == (None, 2)


@pytest.mark.parametrize(
    ("num_tokens", "left", "dropped", "num_valid"),
    [
        (12, (1, None, 3), [], 10),
        (9, (1, None, 3), [], 9),
        (8, (1, None), [3], 8),
        (1, (1,), [3], 1),
        (0, (), [1, 3], 0),
    ],
)
def test_truncate_keeps_the_block_that_it_cuts_through(
    num_tokens: int, left: BlockIds, dropped: list[BlockId], num_valid: int
) -> None:
    made = table([1, None, 3], num_valid=10)

    assert made.truncate(num_tokens) == [dropped]

    assert made.block_ids(0) == left
    assert made.num_valid == num_valid


def test_truncate_lowers_the_mark_of_indexed_blocks() -> None:
    made = table([1, 2, 3], num_valid=12)
    made.num_indexed = 3

    made.truncate(7)

    assert made.num_indexed == 1


@pytest.mark.parametrize(("position", "freed"), [(0, []), (3, []), (4, [1]), (7, [1]), (8, [1, 2]), (99, [1, 2, 3])])
def test_free_before_gives_back_the_blocks_that_end_before_a_position(position: int, freed: list[BlockId]) -> None:
    made = table([1, 2, 3], [7, 8, 9])

    assert made.free_before(0, position) == freed

    assert made.held(0) == [i for i in (1, 2, 3) if i not in freed]
    assert made.num_blocks(0) == 3
    assert made.held(1) == [7, 8, 9]


def test_free_before_gives_nothing_back_twice() -> None:
    made = table([None, 2, 3, 4])

    assert made.free_before(0, 8) == [2]
    assert made.free_before(0, 8) == []
    assert made.free_before(0, 4) == []
    assert made.free_before(0, 12) == [3]


def test_places_added_after_a_cut_into_the_holes_can_be_freed_again() -> None:
    made = table([1, 2, 3])
    made.free_before(0, 12)
    made.truncate(4)

    made.append(0, places(5, 6))

    assert made.held(0) == [5, 6]
    assert made.free_before(0, 8) == [5]


def test_a_range_is_whole_without_hole_or_missing_place() -> None:
    made = table([1, None, 3, 4])

    assert made.is_whole(0, range(8, 16))
    assert made.is_whole(0, range(4))
    assert made.is_whole(0, range(4, 4))
    assert not made.is_whole(0, range(7, 9))
    assert not made.is_whole(0, range(12, 17))


steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 5)),
        st.tuples(st.just("truncate"), st.integers(0, 40)),
        st.tuples(st.just("free_before"), st.integers(0, 40)),
        st.tuples(st.just("set_valid"), st.integers(0, 40)),
    ),
    max_size=30,
)


@given(steps)
def test_every_id_is_in_the_table_or_was_given_back_once(script: list[tuple[str, int]]) -> None:
    made = BlockTable(num_groups=1, block_size=4)
    fresh = iter(range(1000))
    inside: set[int] = set()

    for action, amount in script:
        if action == "append":
            ids = [next(fresh) for _ in range(amount)]
            made.append(0, places(*ids))
            inside |= set(ids)
        elif action == "set_valid":
            made.set_valid(min(amount, made.capacity))
        else:
            back = made.truncate(amount)[0] if action == "truncate" else made.free_before(0, amount)
            assert set(back) <= inside
            assert len(set(back)) == len(back)
            inside -= set(back)

        assert made.held(0) == [i for i in made.block_ids(0) if i is not None]
        assert set(made.held(0)) == inside
        assert made.num_valid <= made.capacity
