"""Keys are the same everywhere, and differ wherever the KV may."""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_store.block_key import KeyExtras, block_keys, root_key
from messages.requests import Adapter

EXTRAS = KeyExtras(model="weights-1", block_size=4, codec="raw-float32")
GOLDEN_ROOT = "cee2aadc7d9d5941cd56adee626e5f2975871ed986a6fd7a3e5bddeec7afd895"
GOLDEN_KEYS = [
    "ba26889deba397f1a37675549ea24c65a72d995a38ab44419d786f75c62920ed",
    "e298234f4294ab1d2298dcf1f095ceef20f4c7342a9ce40dc1a4b5bcb892afbf",
]
GOLDEN_FULL_ROOT = "c78c8485cacba968f088b92101a0054a5b05f8f811a10671815c4b1667445138"
FULL = KeyExtras(
    model="weights-1", block_size=4, codec="raw-float32", adapter=Adapter(name="a", digest="d"), salt=b"tenant"
)

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_the_digests_are_pinned() -> None:
    """Rule 12: sha256 over typed, length-prefixed parts, the same everywhere."""
    root = root_key(EXTRAS)

    assert root.hex() == GOLDEN_ROOT
    assert [key.hex() for key in block_keys(root, [1, 2, 3, 4, 5, 6, 7, 2**32 - 1, 9], 4)] == GOLDEN_KEYS
    assert root_key(FULL).hex() == GOLDEN_FULL_ROOT


def test_a_chain_link_is_the_hash_of_its_parent_and_little_endian_tokens() -> None:
    root = root_key(EXTRAS)

    (key,) = block_keys(root, [1, 256], 2)

    assert key == hashlib.sha256(root + bytes([1, 0, 0, 0, 0, 1, 0, 0])).digest()


def test_processes_with_other_hash_seeds_agree() -> None:
    program = (
        "from kv_store.block_key import *; from messages.requests import Adapter;"
        "e = KeyExtras(model='weights-1', block_size=4, codec='raw-float32',"
        " adapter=Adapter(name='a', digest='d'), salt=b'tenant');"
        "print(*(k.hex() for k in block_keys(root_key(e), range(100), 4)))"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for seed in (int.from_bytes(os.urandom(2)), 1)
    ]

    assert outputs[0] == outputs[1] == [key.hex() for key in block_keys(root_key(FULL), range(100), 4)]


def test_typed_extras_do_not_collide() -> None:
    variants = [
        EXTRAS,
        replace(EXTRAS, salt=b"x"),
        replace(EXTRAS, adapter=Adapter(name="x", digest="")),
        replace(EXTRAS, adapter=Adapter(name="", digest="x")),
        replace(EXTRAS, adapter=Adapter(name="", digest="")),
        replace(EXTRAS, adapter=Adapter(name="ab", digest="c")),
        replace(EXTRAS, adapter=Adapter(name="a", digest="bc")),
        replace(EXTRAS, adapter=Adapter(name="a", digest="b"), salt=b"c"),
        replace(EXTRAS, model="weights-1x"),
        replace(EXTRAS, model="x"),
        replace(EXTRAS, codec="x"),
        replace(EXTRAS, block_size=8),
        replace(EXTRAS, model="weights", codec="-1raw-float32"),
    ]

    assert len({root_key(variant) for variant in variants}) == len(variants)


def test_an_adapter_reloaded_with_other_weights_is_another_identity() -> None:
    first, second = (replace(EXTRAS, adapter=Adapter(name="lora", digest=digest)) for digest in ("v1", "v2"))

    assert not set(block_keys(root_key(first), range(8), 4)) & set(block_keys(root_key(second), range(8), 4))


@pytest.mark.parametrize(("num_tokens", "num_keys"), [(0, 0), (1, 0), (31, 0), (32, 1), (33, 1), (63, 1), (64, 2)])
def test_only_full_blocks_have_keys(num_tokens: int, num_keys: int) -> None:
    """Rule 14."""
    assert len(block_keys(root_key(EXTRAS), range(num_tokens), 32)) == num_keys


@given(tokens, tokens)
def test_prompts_share_exactly_the_keys_of_their_common_blocks(left: list[int], right: list[int]) -> None:
    root = root_key(EXTRAS)
    ours, theirs = block_keys(root, left, 4), block_keys(root, right, 4)

    for i, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        end = 4 * (i + 1)
        assert (mine == other) == (left[:end] == right[:end])


@given(tokens, st.integers(0, 10))
def test_a_chain_goes_on_from_its_last_key(ids: list[int], num_blocks: int) -> None:
    root = root_key(EXTRAS)
    whole = block_keys(root, ids, 4)

    head = block_keys(root, ids[: 4 * num_blocks], 4)
    tail = block_keys(head[-1] if head else root, ids[4 * len(head) :], 4)

    assert head + tail == whole


@pytest.mark.parametrize("token", [-1, 2**32])
def test_an_id_that_does_not_fit_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        block_keys(root_key(EXTRAS), [0, token], 2)
