"""One promise, every ledger: memory, one and four Valkey shards, a Redis Cluster, and Redis behind TLS and AUTH.

Every command over the cluster passes its slot check, so the suite also shows that no step touches two slots: rule 8.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from cluster.admission_log import AdmissionLog
from messages.errors import ConfigError, Unavailable
from messages.reservations import Admitted, Need, Reservation
from tests.contract.ledger_places import (
    NEED,
    POOL,
    TTL_S,
    Clock,
    LedgerPlace,
    candidate,
    memory_place,
    pending_tokens,
    redis_place,
    reserve_on,
)
from tests.contract.registry_places import REDIS_KINDS

PAIR = [candidate("a"), candidate("b")]


@pytest.fixture(params=["memory", *REDIS_KINDS])
async def place(request: pytest.FixtureRequest) -> AsyncIterator[LedgerPlace]:
    place = memory_place(Clock()) if request.param == "memory" else redis_place(request, request.param)
    async with AsyncExitStack() as stack:
        for ledger in (*place.gateways, place.elsewhere):
            await stack.enter_async_context(ledger)
        yield place


async def test_the_cheapest_candidate_gets_the_request(place: LedgerPlace) -> None:
    candidates = [candidate("a", 5.5), candidate("b", 5.25), candidate("c", 6.0)]

    reservation = await place.ledger.reserve(
        POOL, candidates, Need(prefill_tokens=70, kv_tokens=90), nonce="r/1", ttl_s=TTL_S
    )

    assert reservation == Reservation(
        nonce="r/1",
        pool=POOL,
        worker_id="b",
        incarnation="life-1",
        issuer=reservation.issuer,
        sequence=1,
        prefill_tokens=70,
        kv_tokens=90,
    )
    assert await place.second_gateway.pending(POOL) == [reservation]


async def test_the_first_of_equally_cheap_ones_is_taken(place: LedgerPlace) -> None:
    assert await reserve_on(place.ledger, "r", [candidate("b"), candidate("a")]) == "b"


async def test_a_burst_over_two_gateways_spreads_evenly(place: LedgerPlace) -> None:
    """Case 61: 8 simultaneous requests of 32k tokens to 4 idle workers, 2 each; rule 16."""
    need = Need(prefill_tokens=32_768, kv_tokens=32_769)
    idle = [candidate(worker_id) for worker_id in "abcd"]

    chosen = await asyncio.gather(*(reserve_on(place.gateways[i % 2], f"r/{i}", idle, need) for i in range(8)))

    assert Counter(chosen) == dict.fromkeys("abcd", 2)
    assert await pending_tokens(place.ledger) == dict.fromkeys("abcd", 65_536)


async def test_many_at_once_lose_and_double_nothing(place: LedgerPlace) -> None:
    workers = [candidate(worker_id) for worker_id in "abcdef"]
    nonces = [f"r/{number}" for number in range(60)]

    made = await asyncio.gather(
        *(
            ledger.reserve(POOL, workers, NEED, nonce=nonce, ttl_s=TTL_S)
            for nonce in nonces
            for ledger in place.gateways
        )
    )

    assert made[0::2] == made[1::2]
    sequences = sorted((row.worker_id, row.sequence) for row in made[0::2])
    assert sequences == [(worker_id, sequence) for worker_id in "abcdef" for sequence in range(1, 11)]
    assert len(await place.ledger.pending(POOL)) == 60

    ended = await asyncio.gather(*(ledger.release(POOL, nonce) for nonce in nonces for ledger in place.gateways))

    assert sum(ended) == 60
    assert await place.second_gateway.pending(POOL) == []


async def test_what_is_pending_weighs_as_the_candidate_says(place: LedgerPlace) -> None:
    await reserve_on(place.ledger, "r/1", [candidate("a")])

    by_tokens = [candidate("a", cost_per_token=0.5), candidate("b", 50.25)]
    assert await reserve_on(place.second_gateway, "r/2", by_tokens) == "a"

    by_requests = [candidate("a", cost_per_token=0.0, cost_per_request=3.0), candidate("b", 5.75)]
    assert await reserve_on(place.ledger, "r/3", by_requests) == "b"


async def test_a_worker_without_room_for_the_kv_is_dearer_by_what_is_lacking(place: LedgerPlace) -> None:
    need = Need(prefill_tokens=0, kv_tokens=600)
    tight, roomy = candidate("a", room_tokens=1000, cost_per_token=2.0), candidate("b", 399.0)
    assert await reserve_on(place.ledger, "r/1", [tight, roomy], need) == "a"

    assert await reserve_on(place.ledger, "r/2", [tight, roomy], need) == "b", "200 tokens lack, at 2 each"

    cheap = candidate("a", room_tokens=1000, cost_per_token=2.0, cost_per_lacking_token=1.5)
    assert await reserve_on(place.ledger, "r/3", [cheap, candidate("b", 300.5)], need) == "a", "at 1.5 each"


async def test_the_same_nonce_reserves_once_wherever_it_is_said(place: LedgerPlace) -> None:
    """Rule 16: W0, a duplicated message."""
    first = await place.ledger.reserve(POOL, PAIR, NEED, nonce="r", ttl_s=TTL_S)

    again = await place.ledger.reserve(POOL, PAIR, NEED, nonce="r", ttl_s=TTL_S)
    elsewhere = await place.second_gateway.reserve(
        POOL, [candidate("c", -1.0)], Need(prefill_tokens=1, kv_tokens=1), nonce="r", ttl_s=TTL_S
    )

    assert again == elsewhere == first
    assert await place.ledger.pending(POOL) == [first]


async def test_a_late_duplicate_reserves_nothing(place: LedgerPlace) -> None:
    first = await place.ledger.reserve(POOL, PAIR, NEED, nonce="r", ttl_s=TTL_S)
    await place.ledger.release(POOL, "r")

    late = await place.second_gateway.reserve(POOL, PAIR, NEED, nonce="r", ttl_s=TTL_S)

    assert late == first
    assert await place.ledger.pending(POOL) == []


async def test_a_reservation_ends_once(place: LedgerPlace) -> None:
    await reserve_on(place.ledger, "r/1", PAIR)
    await reserve_on(place.ledger, "r/2", PAIR)

    assert await place.second_gateway.release(POOL, "r/1") is True
    assert await place.ledger.release(POOL, "r/1") is False
    assert await place.ledger.release(POOL, "never made") is False

    assert await pending_tokens(place.ledger) == {"b": 100}


async def test_a_release_that_overtakes_its_reserve_leaves_nothing(place: LedgerPlace) -> None:
    """The caller has left, and its words come by another connection."""
    assert await place.second_gateway.release(POOL, "r") is False

    with pytest.raises(Unavailable):
        await reserve_on(place.ledger, "r", PAIR)

    assert await place.ledger.pending(POOL) == []
    assert place.ledger.num_open == 0
    assert await place.ledger.release(POOL, "r") is False


async def test_what_was_released_weighs_no_more(place: LedgerPlace) -> None:
    assert await reserve_on(place.ledger, "r/1", PAIR) == "a"
    await place.ledger.release(POOL, "r/1")

    assert await reserve_on(place.second_gateway, "r/2", PAIR) == "a"


async def test_a_reservation_ends_with_its_time(place: LedgerPlace) -> None:
    await reserve_on(place.ledger, "short", [candidate("a")], ttl_s=0.01)
    await reserve_on(place.ledger, "long", [candidate("b")], ttl_s=TTL_S)

    await place.let_time_pass()

    assert [row.nonce for row in await place.second_gateway.pending(POOL)] == ["long"]
    assert await place.ledger.release(POOL, "short") is False
    assert await reserve_on(place.ledger, "r", PAIR) == "a", "it weighs no more"


async def test_a_nonce_is_free_again_after_its_time(place: LedgerPlace) -> None:
    await reserve_on(place.ledger, "r", [candidate("a")], ttl_s=0.01)

    await place.let_time_pass()

    assert await reserve_on(place.ledger, "r", [candidate("b")]) == "b"
    assert await pending_tokens(place.ledger) == {"b": 100}


async def test_more_can_end_at_once_than_one_step_sweeps(place: LedgerPlace) -> None:
    await asyncio.gather(*(reserve_on(place.ledger, f"r/{i}", [candidate("a")], ttl_s=0.1) for i in range(80)))

    for _ in range(6):
        await place.let_time_pass()

    assert await reserve_on(place.ledger, "r", [candidate("a"), candidate("b", 0.5)]) == "a", "none of them weighs"
    assert [row.nonce for row in await place.ledger.pending(POOL)] == ["r"]
    for _ in range(4):
        await place.ledger.release(POOL, "nothing")
    assert place.ledger.num_open == 1
    assert place.ledger.num_expired == 80


async def test_what_the_heartbeat_counts_is_not_counted_again(place: LedgerPlace) -> None:
    """Rule 16: nothing counts twice, whichever heartbeat a gateway has."""
    log = AdmissionLog()
    for number in range(3):
        made = await place.ledger.reserve(POOL, [candidate("a")], NEED, nonce=f"r/{number}", ttl_s=TTL_S)
        if number != 1:
            log.admit(made.issuer, made.sequence)

    fresh, stale = candidate("a", 200.0, admitted=log.admitted()), candidate("a", 0.0)

    assert await reserve_on(place.ledger, "r/3", [fresh, candidate("b", 300.5)]) == "a", "200 + the one that is pending"
    assert await reserve_on(place.second_gateway, "r/4", [stale, candidate("b", 399.5)]) == "b", "all four are pending"
    assert await reserve_on(place.ledger, "r/5", [fresh, candidate("b", 299.5)]) == "b", "200 + two that are pending"


async def test_admissions_of_another_issuer_say_nothing(place: LedgerPlace) -> None:
    made = await place.ledger.reserve(POOL, [candidate("a")], NEED, nonce="r/1", ttl_s=TTL_S)
    other = Admitted(issuer="another", through=made.sequence)

    assert await reserve_on(place.ledger, "r/2", [candidate("a", admitted=(other,)), candidate("b", 99.5)]) == "b"


async def test_a_restarted_worker_has_nothing_pending(place: LedgerPlace) -> None:
    first = await place.ledger.reserve(POOL, [candidate("a")], NEED, nonce="r/1", ttl_s=TTL_S)

    again = await place.second_gateway.reserve(
        POOL, [candidate("a", incarnation="life-2"), candidate("b", 0.5)], NEED, nonce="r/2", ttl_s=TTL_S
    )

    assert (again.worker_id, again.incarnation, again.sequence) == ("a", "life-2", 1)
    assert again.issuer != first.issuer
    assert await place.ledger.pending(POOL) == [again]
    assert await place.ledger.release(POOL, "r/1") is False
    assert place.second_gateway.num_dropped == 1


async def test_a_restarted_worker_that_is_not_chosen_has_nothing_pending_either(place: LedgerPlace) -> None:
    await reserve_on(place.ledger, "r/1", [candidate("a")])

    await reserve_on(place.ledger, "r/2", [candidate("a", 1.0, incarnation="life-2"), candidate("b")])

    assert await pending_tokens(place.second_gateway) == {"b": 100}


async def test_a_gateway_with_an_old_heartbeat_does_not_touch_the_new_life(place: LedgerPlace) -> None:
    """Rule 6: a worker restarts under its name."""
    old, new = candidate("a"), candidate("a", incarnation="life-2")
    await reserve_on(place.ledger, "r/1", [old])
    await reserve_on(place.ledger, "r/2", [new])

    late = await place.second_gateway.reserve(POOL, [old], NEED, nonce="r/3", ttl_s=TTL_S)
    assert (late.incarnation, late.sequence) == ("life-1", 2)

    assert await reserve_on(place.ledger, "r/4", [new, candidate("b", 99.5)]) == "b", "one is pending on the new life"
    assert await reserve_on(place.ledger, "r/5", [new, candidate("b", 100.5)]) == "a"
    assert [row.nonce for row in await place.ledger.pending(POOL) if row.incarnation == "life-2"] == ["r/2", "r/5"]


async def test_a_life_that_came_up_only_now_may_be_the_older_one_and_locks_nobody_out(place: LedgerPlace) -> None:
    """A ledger that lost its data cannot tell which of two lives came first."""
    old, new = candidate("a"), candidate("a", incarnation="life-2")
    first = await place.ledger.reserve(POOL, [new], NEED, nonce="r/1", ttl_s=TTL_S)
    await reserve_on(place.second_gateway, "r/2", [old])

    again = await place.ledger.reserve(POOL, [new], NEED, nonce="r/3", ttl_s=TTL_S)

    assert (again.incarnation, again.issuer, again.sequence) == ("life-2", first.issuer, 2)


async def test_a_dead_workers_reservations_are_forgotten(place: LedgerPlace) -> None:
    for number in range(3):
        await reserve_on(place.ledger, f"r/{number}", [candidate("a")])
    await reserve_on(place.ledger, "r/b", [candidate("b")])

    assert await place.second_gateway.forget(POOL, "a", "life-0") == 0
    assert await place.second_gateway.forget(POOL, "a", "life-1") == 3
    assert await place.second_gateway.forget(POOL, "a", "life-1") == 0
    assert await place.second_gateway.forget(POOL, "nobody", "life-1") == 0

    assert await pending_tokens(place.ledger) == {"b": 100}
    assert await place.ledger.release(POOL, "r/0") is False


async def test_sequences_go_on_after_a_worker_was_forgotten(place: LedgerPlace) -> None:
    """A gateway may take a worker for dead that is only far away: it counts on in the same log."""
    first = await place.ledger.reserve(POOL, [candidate("a")], NEED, nonce="r/1", ttl_s=TTL_S)
    await place.second_gateway.forget(POOL, "a", "life-1")

    second = await place.ledger.reserve(POOL, [candidate("a")], NEED, nonce="r/2", ttl_s=TTL_S)

    assert (second.issuer, second.sequence) == (first.issuer, 2)


@pytest.mark.parametrize("pool", ["", "}", "{x}", "a}w", "long context", "ü"])
async def test_pools_and_namespaces_do_not_see_each_other(place: LedgerPlace, pool: str) -> None:
    await reserve_on(place.ledger, "r", [candidate("a")])
    await place.ledger.reserve(pool, [candidate("a"), candidate("b", 0.5)], NEED, nonce="r", ttl_s=TTL_S)

    assert await pending_tokens(place.ledger, pool) == {"a": 100}
    assert await pending_tokens(place.ledger) == {"a": 100}
    assert await place.elsewhere.pending(POOL) == []
    assert await place.elsewhere.release(POOL, "r") is False


async def test_names_come_back_as_they_were_given(place: LedgerPlace) -> None:
    named = candidate('wörker "1"\n', incarnation="life|{1}")

    made = await place.ledger.reserve(POOL, [named], NEED, nonce="nönce\x00", ttl_s=TTL_S)

    assert (made.worker_id, made.incarnation, made.nonce) == ('wörker "1"\n', "life|{1}", "nönce\x00")
    assert await place.second_gateway.pending(POOL) == [made]


async def test_without_candidates_nothing_is_reserved(place: LedgerPlace) -> None:
    with pytest.raises(Unavailable):
        await reserve_on(place.ledger, "r", [])

    assert await place.ledger.pending(POOL) == []
    assert await reserve_on(place.ledger, "r", PAIR) == "a", "the nonce is not used up"


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, 3600.5])
async def test_a_ttl_out_of_bounds_is_refused(place: LedgerPlace, ttl_s: float) -> None:
    with pytest.raises(ConfigError):
        await reserve_on(place.ledger, "r", PAIR, ttl_s=ttl_s)


async def test_the_counts_tell_how_reservations_ended(place: LedgerPlace) -> None:
    for number in range(6):
        await reserve_on(place.ledger, f"r/{number}", [candidate("a")])
    await reserve_on(place.ledger, "short", [candidate("b")], ttl_s=0.01)
    await place.let_time_pass()

    await place.ledger.release(POOL, "r/0")
    await place.ledger.release(POOL, "r/0")
    open_before = place.ledger.num_open
    await place.ledger.forget(POOL, "a", "life-1")

    ledger = place.ledger
    assert open_before == 5
    assert (ledger.num_open, ledger.num_expired, ledger.num_released, ledger.num_dropped) == (0, 1, 1, 5)
