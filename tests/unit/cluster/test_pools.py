import pytest

from cluster.pools import PoolSpec, classify

SHORT = PoolSpec(name="short", role="prefill", max_prefill_tokens=256)
LONG = PoolSpec(name="long", role="prefill", min_prefill_tokens=257)
DECODE = PoolSpec(name="decode", role="decode")
BOTH = PoolSpec(name="both", role="unified")


@pytest.mark.parametrize(("tokens", "expected"), [(0, "short"), (255, "short"), (256, "short"), (257, "long")])
def test_the_class_changes_just_above_the_threshold(tokens: int, expected: str) -> None:
    assert classify(tokens, 256) == expected


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(1, ["short", "both"]), (256, ["short", "both"]), (257, ["long", "both"]), (100_000, ["long", "both"])],
)
def test_pools_take_prefills_inside_their_range_and_decode_pools_take_none(tokens: int, expected: list[str]) -> None:
    assert [pool.name for pool in (SHORT, LONG, DECODE, BOTH) if pool.takes(tokens)] == expected
