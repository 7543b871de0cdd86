from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.pools import PoolSpec, classify, first_gap, prefill_boundaries, prefill_chain, with_boundaries

SHORT = PoolSpec(name="short", role="prefill", max_prefill_tokens=256)
LONG = PoolSpec(name="long", role="prefill", min_prefill_tokens=257)
DECODE = PoolSpec(name="decode", role="decode")
BOTH = PoolSpec(name="both", role="unified")
SMALL_KV = PoolSpec(name="small-kv", role="decode", max_context_tokens=8192)
LARGE_KV = PoolSpec(name="large-kv", role="decode", min_context_tokens=8193)


@pytest.mark.parametrize(("tokens", "expected"), [(0, "short"), (255, "short"), (256, "short"), (257, "long")])
def test_the_class_changes_just_above_the_threshold(tokens: int, expected: str) -> None:
    assert classify(tokens, 256) == expected


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(1, ["short", "both"]), (256, ["short", "both"]), (257, ["long", "both"]), (100_000, ["long", "both"])],
)
def test_pools_take_prefills_inside_their_range_and_decode_pools_take_none(tokens: int, expected: list[str]) -> None:
    assert [pool.name for pool in (SHORT, LONG, DECODE, BOTH) if pool.takes(tokens)] == expected


@pytest.mark.parametrize(
    ("uncached", "context", "prefill", "decode"),
    [(500, 20_000, "short", "large-kv"), (20_000, 20_000, "long", "large-kv"), (500, 500, "short", "small-kv")],
)
def test_a_long_prompt_that_is_cached_is_short_for_prefill_and_long_for_kv(
    uncached: int, context: int, prefill: str, decode: str
) -> None:
    """Rule 17, case 64."""
    short, long = replace(SHORT, max_prefill_tokens=2048), replace(LONG, min_prefill_tokens=2049)

    assert [pool.name for pool in (short, long) if pool.takes(uncached, context)] == [prefill]
    assert [pool.name for pool in (SMALL_KV, LARGE_KV) if pool.decodes(context, uncached)] == [decode]


@pytest.mark.parametrize(("context", "expected"), [(8191, True), (8192, True), (8193, False)])
def test_both_ranges_bound_a_pool_that_has_both(context: int, expected: bool) -> None:
    pool = replace(SHORT, max_context_tokens=8192)

    assert pool.takes(256, context) is expected
    assert not pool.takes(257, context)


def test_a_unified_pool_decodes_what_it_would_prefill_unless_others_can() -> None:
    unified = PoolSpec(name="u", role="unified", max_prefill_tokens=256, max_context_tokens=8192)

    assert unified.decodes(8192, 256)
    assert not unified.decodes(8192, 257)
    assert unified.decodes(8192)
    assert not unified.decodes(8193)
    assert not replace(unified, role="prefill").decodes(8192)


@pytest.mark.parametrize(
    ("pools", "gap"),
    [
        ([SHORT, LONG, DECODE], None),
        ([BOTH], None),
        ([SHORT, DECODE], ("prefill", 257, 257)),
        ([LONG, DECODE], ("prefill", 1, 1)),
        ([SHORT, replace(LONG, min_prefill_tokens=258), DECODE], ("prefill", 257, 257)),
        ([SHORT, LONG, SMALL_KV], ("decode", 1, 8193)),
        ([SHORT, LONG, SMALL_KV, LARGE_KV], None),
        ([SHORT, replace(LONG, max_context_tokens=9000), DECODE], ("prefill", 257, 9001)),
        ([replace(BOTH, max_prefill_tokens=99), DECODE], ("prefill", 100, 100)),
        ([replace(BOTH, max_prefill_tokens=99), replace(BOTH, min_prefill_tokens=100)], None),
        ([replace(BOTH, max_prefill_tokens=256), LONG], None),
    ],
)
def test_the_smallest_request_that_nobody_takes_is_found(pools: list[PoolSpec], gap: object) -> None:
    assert first_gap(pools) == gap


BOUND = st.integers(0, 12)
POOL = st.builds(
    PoolSpec,
    name=st.just("p"),
    role=st.sampled_from(["prefill", "decode", "unified"]),
    min_prefill_tokens=BOUND,
    max_prefill_tokens=st.none() | BOUND,
    min_context_tokens=BOUND,
    max_context_tokens=st.none() | BOUND,
)


@given(st.lists(POOL, min_size=1, max_size=4))
def test_no_gap_means_that_every_request_is_taken(pools: list[PoolSpec]) -> None:
    alone = not any(pool.role == "prefill" for pool in pools)

    def is_served(what: str, uncached: int, context: int) -> bool:
        if what == "prefill":
            return any(pool.takes(uncached, context) for pool in pools)
        return any(pool.decodes(context, uncached if alone else None) for pool in pools)

    gap = first_gap(pools)

    if gap is not None:
        assert not is_served(*gap)
    else:
        lengths = [(uncached, context) for context in range(1, 15) for uncached in range(1, context + 1)]
        assert all(is_served(what, *length) for what in ("prefill", "decode") for length in lengths)


@pytest.mark.parametrize(
    ("pools", "boundaries"),
    [
        ([SHORT, LONG, DECODE], (256,)),
        ([LONG, SHORT, BOTH, replace(SHORT, name="short-2")], (256,)),
        ([SHORT, replace(LONG, max_prefill_tokens=999), replace(LONG, min_prefill_tokens=1000)], (256, 999)),
        ([BOTH, DECODE], None),
        ([SHORT, DECODE], None),
        ([replace(LONG, max_prefill_tokens=999), replace(LONG, min_prefill_tokens=1000)], None),
        ([SHORT, replace(LONG, max_prefill_tokens=999)], None),
        ([SHORT, replace(LONG, min_prefill_tokens=300)], None),
        ([SHORT, replace(LONG, min_prefill_tokens=200)], None),
    ],
)
def test_ranges_that_follow_one_another_have_boundaries(pools: list[PoolSpec], boundaries: object) -> None:
    assert prefill_boundaries(pools) == boundaries


@given(st.lists(st.integers(1, 10_000), min_size=2, max_size=2, unique=True).map(sorted))
def test_moved_ranges_still_follow_one_another(boundaries: list[int]) -> None:
    middle, last = replace(LONG, name="m", max_prefill_tokens=999), replace(LONG, min_prefill_tokens=1000)

    moved = with_boundaries([SHORT, middle, last, replace(middle, name="m2"), BOTH, DECODE], boundaries)

    assert prefill_boundaries(moved) == tuple(boundaries)
    assert [pool.name for pool in moved] == ["short", "m", "long", "m2", "both", "decode"]
    assert (moved[1].min_prefill_tokens, moved[1].max_prefill_tokens) == (boundaries[0] + 1, boundaries[1])
    assert (moved[3].min_prefill_tokens, moved[3].max_prefill_tokens) == (boundaries[0] + 1, boundaries[1])
    assert moved[4:] == (BOTH, DECODE)
    assert len(prefill_chain(moved)) == 3
