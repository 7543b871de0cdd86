"""Whose blocks may be reused by whom: keys differ wherever the KV, or the right to it, may differ."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_store.block_key import KeyExtras, block_keys, root_key, tenant_salt
from kv_store.registry.memory import MemoryRegistry
from messages.handoff import BlockKey
from messages.requests import Adapter
from tests.contract.registry_places import worker

BASE = KeyExtras(model="weights-1", block_size=4, codec="raw-float32")
PROMPT = list(range(64))


def keys_of(extras: KeyExtras) -> list[BlockKey]:
    return block_keys(root_key(extras), PROMPT, extras.block_size)


async def holder_of(*held: KeyExtras) -> MemoryRegistry:
    registry = MemoryRegistry()
    await registry.register(worker("a"), lease_s=60)
    for extras in held:
        await registry.publish("a", "life-1", keys_of(extras))
    return registry


async def num_hits(registry: MemoryRegistry, extras: KeyExtras) -> int:
    return (await registry.lookup(keys_of(extras))).by_worker.get("a", 0)


async def test_adapters_share_blocks_only_when_their_content_is_the_same() -> None:
    """Rule 12, case 47: base, A, B, and A loaded again with other weights; then the first A again, which is there."""
    adapters = [
        None,
        Adapter(name="A", digest="weights-a"),
        Adapter(name="B", digest="weights-b"),
        Adapter(name="A", digest="weights-a2"),
    ]
    seen: list[KeyExtras] = []
    for adapter in adapters:
        extras = replace(BASE, adapter=adapter)

        assert await num_hits(await holder_of(*seen), extras) == 0

        seen.append(extras)
    assert await num_hits(await holder_of(*seen), seen[1]) == 16


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (replace(BASE, adapter=Adapter(name="x", digest="")), replace(BASE, salt=b"x")),
        (replace(BASE, adapter=Adapter(name="ab", digest="c")), replace(BASE, adapter=Adapter(name="a", digest="bc"))),
        (replace(BASE, adapter=Adapter(name="", digest="")), BASE),
        (replace(BASE, model="ab", codec="c"), replace(BASE, model="a", codec="bc")),
    ],
)
def test_neighbouring_and_typed_extras_do_not_run_into_each_other(one: KeyExtras, other: KeyExtras) -> None:
    """Rule 12, case 48."""
    assert not set(keys_of(one)) & set(keys_of(other))


async def test_another_salt_hits_nothing_and_the_same_one_hits() -> None:
    """Rule 12, case 49: both are asserted, or the test would pass with caching off."""
    registry = await holder_of(replace(BASE, salt=tenant_salt("t1")))

    assert await num_hits(registry, replace(BASE, salt=tenant_salt("t2"))) == 0
    assert await num_hits(registry, replace(BASE, salt=tenant_salt("t1", "s"))) == 0
    assert await num_hits(registry, BASE) == 0
    assert await num_hits(registry, replace(BASE, salt=tenant_salt("t1"))) == 16


@pytest.mark.parametrize(
    "other",
    [
        replace(BASE, model="weights-2"),
        replace(BASE, codec="raw-bfloat16"),
        replace(BASE, block_size=8),
    ],
)
async def test_what_is_stored_otherwise_is_a_miss(other: KeyExtras) -> None:
    """Rule 13: other weights, dtype, scales or block size are other keys; no bytes are ever reinterpreted."""
    registry = await holder_of(other)

    assert await num_hits(registry, BASE) == 0
    assert await num_hits(registry, other) == len(keys_of(other))


def test_without_tenant_and_client_salt_keys_are_those_of_no_salt() -> None:
    assert tenant_salt("") == b""
    assert keys_of(replace(BASE, salt=tenant_salt(""))) == keys_of(BASE)


def test_salts_are_pinned() -> None:
    """Case 50: the same in every process, or gateways would not find each other's blocks."""
    assert tenant_salt("acme").hex() == "e9dc974793a0e867d34674d6a9830432d4c1fb92a8cd9b74c73ad04e8d0f2d10"
    assert tenant_salt("acme", "chat-7").hex() == "dd5aeb14a6385c76ad1a61cd0253fdd00b014f02bede72624d1af07ec3fffbb5"


def test_a_client_cannot_take_the_place_of_another_tenant() -> None:
    """Rule 12: what a client asks for is combined with its tenant and never replaces it."""
    pairs = [("a", ""), ("", "a"), ("a", "b"), ("ab", ""), ("", "ab"), ("b", "a"), ("a", "a"), ("", "")]

    salts = [tenant_salt(tenant, client) for tenant, client in pairs]

    assert all(one != other for one, other in combinations(salts, 2))


@given(st.text(max_size=8), st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))
def test_different_pairs_have_different_salts(tenant: str, client: str, other: str, other_client: str) -> None:
    """Rule 12, case 48."""
    same_pair = (tenant, client) == (other, other_client)

    assert (tenant_salt(tenant, client) == tenant_salt(other, other_client)) == same_pair
