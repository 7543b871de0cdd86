from collections import Counter
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_store.sharding import RendezvousSharding
from messages.errors import ConfigError

NAMES = st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=8, unique=True)
KEYS = [sha256(str(index).encode()).digest() for index in range(2000)]
PINNED = [1, 0, 1, 2, 2, 0, 1, 1]


@given(names=NAMES, key=st.binary(max_size=40), data=st.data())
def test_the_order_of_the_names_does_not_move_a_key(names: list[str], key: bytes, data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(names))

    assert names[RendezvousSharding(names).shard_of(key)] == shuffled[RendezvousSharding(shuffled).shard_of(key)]


@given(names=NAMES, key=st.binary(max_size=40), new=st.text(min_size=1, max_size=20))
def test_a_new_shard_takes_keys_but_moves_none_between_the_others(names: list[str], key: bytes, new: str) -> None:
    before = names[RendezvousSharding(names).shard_of(key)]
    more = [*names, *([new] if new not in names else [])]

    after = more[RendezvousSharding(more).shard_of(key)]

    assert after in {before, new}


def test_a_removed_shard_moves_only_its_own_keys() -> None:
    names = ["a:1/0", "b:1/0", "c:1/0", "d:1/0"]
    all_four, first_three = RendezvousSharding(names), RendezvousSharding(names[:3])

    moved = [key for key in KEYS if all_four.shard_of(key) != first_three.shard_of(key)]

    assert moved == [key for key in KEYS if all_four.shard_of(key) == 3]


def test_every_shard_gets_its_fair_share() -> None:
    sharding = RendezvousSharding([f"redis-{index}:6379/0" for index in range(4)])

    counts = Counter(sharding.shard_of(key) for key in KEYS)

    assert all(400 < counts[index] < 600 for index in range(4))


def test_places_are_the_same_in_every_process_and_version() -> None:
    sharding = RendezvousSharding(["redis-0:6379/0", "redis-1:6379/0", "redis-2:6379/0"])

    assert [sharding.shard_of(key) for key in KEYS[:8]] == PINNED


def test_split_gives_each_position_to_the_shard_of_its_key() -> None:
    sharding = RendezvousSharding(["a", "b", "c"])

    places = sharding.split(KEYS[:100])

    assert sorted(position for positions in places.values() for position in positions) == list(range(100))
    assert all(sharding.shard_of(KEYS[position]) == shard for shard, held in places.items() for position in held)
    assert all(positions == sorted(positions) for positions in places.values())


@pytest.mark.parametrize("names", [[], ["a", "b", "a"]])
def test_no_shard_and_a_shard_twice_are_refused(names: list[str]) -> None:
    with pytest.raises(ConfigError):
        RendezvousSharding(names)
