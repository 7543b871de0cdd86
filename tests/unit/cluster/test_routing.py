from dataclasses import replace

import pytest

from cluster.pools import PoolSpec
from cluster.reuse import GroupBytes, ReuseRules, WorkerRates
from cluster.routing import Decision, Demand, RoutingRules, WorkerView, choose
from messages.errors import Unavailable

RULES = RoutingRules(
    pools=(
        PoolSpec(name="short", role="prefill", max_prefill_tokens=2048),
        PoolSpec(name="long", role="prefill", min_prefill_tokens=2049),
        PoolSpec(name="decode", role="decode"),
        PoolSpec(name="both", role="unified"),
    ),
    local_prefill_max_tokens=32,
    long_prefill_tokens=2048,
)


def worker(worker_id: str, pool: str, **fields: int) -> WorkerView:
    return WorkerView(worker_id=worker_id, pool=pool, **({"free_tokens": 100_000} | fields))


S1, S2, L1 = worker("s1", "short"), worker("s2", "short"), worker("l1", "long")
D1, D2 = worker("d1", "decode"), worker("d2", "decode")
U1 = worker("u1", "both")


def decide(prompt_tokens: int, *workers: WorkerView, force_remote: bool = False) -> Decision:
    return choose(Demand(prompt_tokens=prompt_tokens), workers, RULES, force_remote=force_remote)


@pytest.mark.parametrize(
    ("prompt_tokens", "prefill"), [(1, None), (31, None), (32, None), (33, "s1"), (2048, "s1"), (2049, "l1")]
)
def test_prefill_goes_by_the_uncached_tokens(prompt_tokens: int, prefill: str | None) -> None:
    assert decide(prompt_tokens, S1, L1, D1).prefill == prefill


@pytest.mark.parametrize(
    ("cached", "prefill", "uncached"),
    [(0, "l1", 20_000), (19_968, None, 32), (19_936, "l1", 20_000), (20_000, None, 1)],
)
def test_what_decode_has_cached_decides_between_local_and_remote(
    cached: int, prefill: str | None, uncached: int
) -> None:
    decision = decide(20_000, S1, L1, replace(D1, cached_tokens=cached))

    assert (decision.prefill, decision.uncached_tokens) == (prefill, uncached)


def test_a_long_prompt_that_is_cached_at_a_short_prefill_worker_is_short() -> None:
    decision = decide(20_000, replace(S1, cached_tokens=19_500), L1, D1)

    assert (decision.prefill, decision.prompt_class) == ("s1", "short")


def test_a_local_prefill_is_bounded_on_a_decode_worker_and_free_on_a_unified_one() -> None:
    assert decide(20, S1, D1).is_local_limited
    assert not decide(20, U1).is_local_limited


def test_a_unified_pool_alone_serves_prompts_of_any_length() -> None:
    decision = decide(20_000, U1)

    assert (decision.decode, decision.prefill) == ("u1", None)


def test_a_refused_local_prefill_goes_remote() -> None:
    assert decide(20, S1, D1, force_remote=True).prefill == "s1"


def test_a_pool_without_a_worker_spills_to_another() -> None:
    assert decide(5000, S1, D1).prefill == "s1"
    assert decide(100, L1, D1).prefill == "l1"


@pytest.mark.parametrize(("workers", "reason"), [((), "decode"), ((S1, L1), "decode"), ((D1,), "prefill")])
def test_without_the_needed_workers_the_request_is_refused_at_once(
    workers: tuple[WorkerView, ...], reason: str
) -> None:
    with pytest.raises(Unavailable, match=reason):
        decide(1000, *workers)


def test_decode_goes_where_the_prefix_is_unless_that_worker_is_too_busy() -> None:
    warm = replace(D2, cached_tokens=960)

    assert decide(1000, S1, D1, warm).decode == "d2"
    assert decide(1000, S1, D1, replace(warm, running=29)).decode == "d2"
    assert decide(1000, S1, D1, replace(warm, running=31)).decode == "d1"


def test_decode_avoids_a_worker_without_room() -> None:
    assert decide(1000, S1, replace(D1, free_tokens=500), replace(D2, running=20)).decode == "d2"


def test_prefill_goes_to_the_shorter_queue() -> None:
    assert decide(1000, replace(S1, queued_prefill_tokens=10), S2, D1).prefill == "s2"


FAST = WorkerRates(prefill_tokens_s=1000.0, transfer_bytes_s=1e9, groups=(GroupBytes(token_bytes=1000),))
"""A token is read in a thousandth of the time that computing it takes."""
REUSE = replace(RULES, reuse=ReuseRules(min_tokens=32, overhead_s=0.01, margin=0.0))


def decide_reuse(prompt_tokens: int, *workers: WorkerView, force_remote: bool = False) -> Decision:
    able = [replace(worker, rates=FAST) for worker in workers]
    return choose(Demand(prompt_tokens=prompt_tokens), able, REUSE, force_remote=force_remote)


def test_without_rules_for_reuse_nothing_is_fetched() -> None:
    decision = decide(1000, S1, D1, replace(D2, cached_tokens=960, running=50))

    assert (decision.decode, decision.reuse.verdict) == ("d1", "nothing")


def test_a_unified_worker_fetches_what_a_busy_one_holds() -> None:
    busy, idle = replace(U1, cached_tokens=960, running=9), worker("u2", "both")

    decision = decide_reuse(1000, busy, idle)

    assert (decision.decode, decision.prefill, decision.uncached_tokens) == ("u2", None, 40)
    assert (decision.reuse.verdict, decision.reuse.sources, decision.reuse.gained_tokens) == ("fetch", ("u1",), 960)


def test_the_holder_itself_is_chosen_while_it_is_idle() -> None:
    decision = decide_reuse(1000, replace(U1, cached_tokens=960), worker("u2", "both"))

    assert (decision.decode, decision.reuse.verdict) == ("u1", "nothing")


@pytest.mark.parametrize(("rest", "prefill"), [(32, None), (33, "s1")])
def test_a_decode_worker_fetches_and_computes_the_rest_when_its_limit_allows(rest: int, prefill: str | None) -> None:
    """Rule 15: by the tokens that are uncached there, after what is fetched."""
    decision = decide_reuse(960 + rest, replace(S1, cached_tokens=960), D1)

    assert (decision.prefill, decision.uncached_tokens) == (prefill, rest)
    assert decision.is_local_limited == (prefill is None)
    assert decision.reuse.sources == (("s1",) if prefill is None else ())


def test_a_refused_local_prefill_goes_remote_whatever_could_be_fetched() -> None:
    assert decide_reuse(970, replace(S1, cached_tokens=960), D1, force_remote=True).prefill == "s1"


def test_the_prefill_worker_fetches_what_another_holds() -> None:
    decision = decide_reuse(1960, replace(S1, cached_tokens=960, queued_prefill_tokens=5000), S2, D1)

    assert (decision.prefill, decision.uncached_tokens, decision.reuse.sources) == ("s2", 1000, ("s1",))


def test_the_pool_is_chosen_by_what_is_left_after_the_fetch() -> None:
    decision = decide_reuse(20_000, S1, replace(D1, cached_tokens=0), replace(L1, cached_tokens=19_000, running=500))

    assert (decision.prefill, decision.prompt_class, decision.uncached_tokens) == ("s1", "short", 1000)


def test_blocks_move_between_equal_layouts_only() -> None:
    other = replace(U1, cached_tokens=960, running=9, fingerprint="another")

    assert decide_reuse(1000, other, worker("u2", "both")).reuse.verdict == "nothing"


@pytest.mark.parametrize("held", range(0, 1000, 37))
def test_one_more_token_elsewhere_never_makes_a_worker_dearer(held: int) -> None:
    costs = [
        decide_reuse(1000, replace(U1, cached_tokens=held + more, running=99), worker("u2", "both")).uncached_tokens
        for more in (0, 1)
    ]

    assert costs[1] <= costs[0]


def test_contexts_choose_the_decode_pool_and_the_rest_the_prefill_pool() -> None:
    """Rule 17, case 64: 20,000 tokens of which 19,500 are cached are short for prefill and long for KV."""
    pools = (*RULES.pools[:2], replace(RULES.pools[2], max_context_tokens=8192), PoolSpec(name="large", role="decode"))
    rules = replace(RULES, pools=(*pools[:3], replace(pools[3], min_context_tokens=8193)))
    large = worker("d9", "large", queued_prefill_tokens=50_000)

    def placed(prompt_tokens: int, *workers: WorkerView) -> tuple[str, str | None]:
        decision = choose(Demand(prompt_tokens=prompt_tokens), workers, rules)
        return decision.decode, decision.prefill

    assert placed(8192, S1, L1, D1, large) == ("d1", "l1")
    assert placed(20_000, S1, L1, D1, large) == ("d9", "l1")
    assert placed(20_000, replace(S1, cached_tokens=19_500), L1, D1, large) == ("d9", "s1")
    assert placed(20_000, S1, L1, D1) == ("d1", "l1")


def test_unified_pools_alone_take_the_requests_of_their_ranges() -> None:
    rules = replace(
        RULES,
        pools=(
            PoolSpec(name="both", role="unified", max_prefill_tokens=2048),
            PoolSpec(name="long", role="unified", min_prefill_tokens=2049),
        ),
    )
    busy = replace(U1, queued_prefill_tokens=100_000)

    decisions = [choose(Demand(prompt_tokens=n), [busy, L1], rules).decode for n in (2048, 2049)]

    assert decisions == ["u1", "l1"]
    assert choose(Demand(prompt_tokens=2049), [busy], rules).decode == "u1"
