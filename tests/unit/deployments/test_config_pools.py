"""What the config says about pools: which requests they take, and how large their steps are."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments import config as whole
from deployments import config_pools
from deployments.config import AppConfig, load_config, parse_config
from messages.errors import ConfigError

DECODE = {"name": "d", "role": "decode"}


def parsed(pools: list[dict[str, Any]], **model: object) -> AppConfig:
    return parse_config({"version": 1, "models": [{"source": "demo", **model}], "pools": pools})


@given(st.integers(min_value=1, max_value=10**6))
def test_short_and_long_pools_meet_without_gap_or_overlap(boundary: int) -> None:
    pools = [
        {"name": "s", "role": "prefill", "requests": "short"},
        {"name": "l", "role": "prefill", "requests": "long"},
        DECODE,
    ]
    data = {"version": 1, "models": [{"source": "demo"}], "pools": pools}

    short, long, decode = parse_config({**data, "routing": {"long_prefill_tokens": boundary}}).pool_specs()

    assert (short.min_prefill_tokens, short.max_prefill_tokens) == (0, boundary)
    assert (long.min_prefill_tokens, long.max_prefill_tokens) == (boundary + 1, None)
    assert (decode.min_prefill_tokens, decode.max_prefill_tokens) == (0, None)


def test_ranges_of_tokens_reach_the_router() -> None:
    """Rule 17."""
    config = parsed(
        [
            {"name": "s", "role": "prefill", "prefill_tokens": {"max": 512}, "context_tokens": {"max": 4096}},
            {"name": "m", "role": "prefill", "prefill_tokens": {"min": 513}, "context_tokens": {"max": 4096}},
            {"name": "l", "role": "prefill", "context_tokens": {"min": 4097}},
            {"name": "u", "role": "unified", "prefill_tokens": {"min": 1, "max": 64}},
            DECODE,
        ]
    )

    short, middle, long, unified, _ = config.pool_specs()

    takers = {
        request: [pool.name for pool in (short, middle, long) if pool.takes(*request)]
        for request in ((512, 4096), (513, 4096), (1, 4097), (5000, 5000))
    }
    assert list(takers.values()) == [["s"], ["m"], ["l"], ["l"]]
    assert (unified.min_prefill_tokens, unified.max_prefill_tokens) == (1, 64)


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        (
            [{"name": "p", "role": "prefill", "prefill_tokens": {"max": 512}}, DECODE],
            "pools: none takes the prefill of a prompt of 513 tokens with 513 of them uncached; widen prefill_tokens",
        ),
        (
            [{"name": "u", "role": "unified", "context_tokens": {"min": 2}}],
            "pools: none takes the prefill of a prompt of 1 tokens with 1 of them uncached",
        ),
        (
            [{"name": "p", "role": "prefill"}, {**DECODE, "context_tokens": {"max": 4096}}],
            "pools: none takes the decode of a prompt of 4097 tokens",
        ),
        (
            [{"name": "p", "role": "prefill", "requests": "short", "prefill_tokens": {"max": 9}}, DECODE],
            "pools.0: requests: short and prefill_tokens are two ways to say it; give one",
        ),
        (
            [{"name": "p", "role": "prefill", "requests": "long", "context_tokens": {"min": 9}}, DECODE],
            "pools.0: requests: long and context_tokens are two ways to say it; give one",
        ),
        (
            [{"name": "p", "role": "prefill"}, {**DECODE, "prefill_tokens": {"max": 9}}],
            "pools.1: prefill_tokens has no meaning in a pool that only decodes; use context_tokens",
        ),
        (
            [{"name": "p", "role": "prefill", "prefill_tokens": {"min": 9, "max": 8}}, DECODE],
            "pools.0.prefill_tokens: min must not be larger than max, got 9 and 8",
        ),
        (
            [{"name": "p", "role": "prefill", "prefill_tokens": {"mix": 9}}, DECODE],
            'pools.0.prefill_tokens.mix: no such field; did you mean "min"?',
        ),
        (
            [{"name": "p", "role": "prefill", "prefill_chunk_tokens": 513}, DECODE],
            "pools: prefill_chunk_tokens of p is larger than its max_batch_tokens",
        ),
        (
            [{"name": "p", "role": "prefill", "prefill_chunk_tokens": 65, "max_batch_tokens": 64}, DECODE],
            "pools: prefill_chunk_tokens of p is larger than its max_batch_tokens",
        ),
    ],
)
def test_pools_that_make_no_sense_are_refused_in_one_line(pools: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(pools)

    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("pool", "model", "batch", "chunk"),
    [
        ({}, {}, 512, 256),
        ({"role": "prefill"}, {}, 512, 512),
        ({"max_batch_tokens": 64}, {}, 64, 32),
        ({"max_batch_tokens": 1}, {}, 1, 1),
        ({"role": "prefill", "max_batch_tokens": 2048}, {}, 2048, 2048),
        ({"prefill_chunk_tokens": 100}, {}, 512, 100),
        ({"prefill_chunk_tokens": 1000, "max_batch_tokens": 1000}, {"prefill_chunk_tokens": 16}, 1000, 1000),
        ({"max_batch_tokens": 64}, {"prefill_chunk_tokens": 128}, 64, 64),
        ({}, {"prefill_chunk_tokens": 128, "max_batch_tokens": 1024}, 1024, 128),
    ],
)
def test_a_pool_overrides_the_step_of_the_model(
    pool: dict[str, Any], model: dict[str, Any], batch: int, chunk: int
) -> None:
    config = parsed([{"name": "p", "role": "unified", **pool}, {"name": "all", "role": "unified"}], **model)

    assert config.batch_tokens(config.pools[0]) == batch
    assert config.chunk_tokens(config.pools[0]) == chunk


def test_a_range_can_be_set_where_there_was_none() -> None:
    config = load_config(None, {"pools.0.prefill_tokens.min": 1, "pools.1.context_tokens.min": 1})

    assert [(spec.min_prefill_tokens, spec.min_context_tokens) for spec in config.pool_specs()] == [(1, 0), (0, 1)]


def test_the_sections_of_pools_are_found_where_they_were() -> None:
    names = ("PoolConfig", "RoutingConfig", "LimitsConfig", "RequestClass", "TokenRange")

    assert [getattr(whole, name) for name in names] == [getattr(config_pools, name) for name in names]


def test_adaptive_ranges_need_pools_that_follow_one_another() -> None:
    pools = [
        {"name": "short", "role": "prefill", "requests": "short"},
        {"name": "long", "role": "prefill", "requests": "long"},
        {"name": "decode", "role": "decode"},
    ]
    given = {"version": 1, "models": [{"source": "demo"}], "routing": {"thresholds": "adaptive"}}

    assert parse_config({**given, "pools": pools}).routing.thresholds == "adaptive"
    with pytest.raises(ConfigError, match="adaptive needs pools"):
        parse_config(given)


def test_a_pool_must_leave_its_line_below_where_it_was_entered() -> None:
    given = {"version": 1, "models": [{"source": "demo"}], "routing": {"spill_enter": 0.5, "spill_leave": 0.5}}

    with pytest.raises(ConfigError, match="spill_leave"):
        parse_config(given)
