"""The book of one pool on an injected clock; what every ledger promises is in the contract tests."""

import itertools
from collections import Counter

import pytest

from cluster.admission_log import AdmissionLog
from cluster.ledger import Load, PoolBook, total_cost
from cluster.memory_ledger import MemoryLedger
from messages.errors import Unavailable
from messages.reservations import MAX_TTL_S, Admitted, Candidate, Need, Reservation
from tests.contract.ledger_places import NEED, POOL, Clock, candidate, reserve_on


def put(book: PoolBook, nonce: str, *candidates: Candidate, now_s: float = 0.0, ttl_s: float = 10.0) -> Reservation:
    return book.reserve(candidates or [candidate("a")], NEED, nonce=nonce, ttl_s=ttl_s, now_s=now_s)


def test_eight_long_requests_at_once_go_to_four_idle_workers_two_each() -> None:
    """Case 61: 32k tokens each, none of them in any heartbeat yet; rule 16."""
    book = PoolBook("long")
    idle = [candidate(worker_id) for worker_id in "abcd"]
    need = Need(prefill_tokens=32_768, kv_tokens=32_769)

    chosen = [book.reserve(idle, need, nonce=f"r/{number}", ttl_s=10.0, now_s=0.0).worker_id for number in range(8)]

    assert Counter(chosen) == dict.fromkeys("abcd", 2)


def test_a_worker_that_is_busy_by_its_heartbeat_gets_its_share_later() -> None:
    book = PoolBook("long")
    workers = [candidate("a", 250.0), candidate("b"), candidate("c", 100.5)]

    chosen = [put(book, f"r/{number}", *workers).worker_id for number in range(7)]

    assert chosen == ["b", "b", "c", "b", "c", "a", "b"]


@pytest.mark.parametrize(
    ("pending", "changes", "cost"),
    [
        (Load(), {}, 5.0),
        (Load(prefill_tokens=30), {}, 5.0 + 30 * 2.0),
        (Load(kv_tokens=900), {}, 5.0),
        (Load(kv_tokens=901), {}, 5.0 + 1 * 2.0),
        (Load(kv_tokens=950), {"cost_per_lacking_token": 0.25}, 5.0 + 50 * 0.25),
        (Load(), {"room_tokens": 0}, 5.0 + 100 * 2.0),
        (Load(num_requests=3), {"cost_per_request": 7.0}, 5.0 + 3 * 7.0),
        (
            Load(prefill_tokens=30, kv_tokens=950, num_requests=3),
            {"cost_per_request": 7.0},
            5.0 + 30 * 2.0 + 3 * 7.0 + 50 * 2.0,
        ),
    ],
)
def test_the_cost_grows_with_what_is_pending_without_a_jump(
    pending: Load, changes: dict[str, float], cost: float
) -> None:
    """Rule 18."""
    given = {"cost_per_token": 2.0, "room_tokens": 1000} | changes

    assert total_cost(candidate("a", 5.0, **given), pending, NEED) == cost


def test_a_worker_that_must_not_be_chosen_is_no_candidate() -> None:
    with pytest.raises(AssertionError):
        candidate("a", float("inf"))


def test_a_reservation_ends_at_its_very_end() -> None:
    book = PoolBook(POOL)
    made = put(book, "r", ttl_s=10.0)

    assert book.pending(9.999) == [made]
    assert book.pending(10.0) == []
    assert (book.num_open, book.num_expired) == (0, 1)


def test_a_release_that_came_first_is_remembered_for_ten_seconds() -> None:
    book = PoolBook(POOL)
    book.release("r", 0.0)
    with pytest.raises(Unavailable):
        put(book, "r", now_s=9.999)

    assert put(book, "r", now_s=10.0).sequence == 1


def test_an_admitted_reservation_that_ends_changes_nothing_for_who_has_the_heartbeat() -> None:
    book, log = PoolBook(POOL), AdmissionLog()
    made = put(book, "r/1")
    log.admit(made.issuer, made.sequence)
    seen = candidate("a", 100.0, admitted=log.admitted())
    before = put(book, "r/2", seen, candidate("b", 100.5)).worker_id
    book.release("r/2", 0.0)

    book.release("r/1", 0.0)

    assert before == put(book, "r/3", seen, candidate("b", 100.5)).worker_id == "a"


def test_a_worker_that_nobody_used_for_long_is_numbered_anew_under_another_issuer() -> None:
    issuers = (f"issuer-{number}" for number in itertools.count())
    book = PoolBook(POOL, make_issuer=lambda: next(issuers))
    put(book, "r/1")
    last = put(book, "r/2", now_s=MAX_TTL_S - 1)
    kept = put(book, "r/3", now_s=2 * MAX_TTL_S - 2)

    later = put(book, "r/4", now_s=3 * MAX_TTL_S)

    assert (last.issuer, last.sequence, kept.issuer, kept.sequence) == ("issuer-0", 2, "issuer-0", 3)
    assert (later.issuer, later.sequence) == ("issuer-1", 1)


def test_a_book_keeps_nothing_of_what_is_long_over() -> None:
    book = PoolBook(POOL)
    for number in range(1000):
        lives = [candidate(f"worker-{number}", incarnation=f"life-{life}") for life in range(10)]
        for life in lives:
            put(book, f"r/{number}/{life.incarnation}", life, now_s=float(number))

    book.expire(1000.0 + MAX_TTL_S)

    assert (book._known, book._ends, book._workers) == ({}, [], {})
    assert book.num_expired + book.num_dropped == 10_000


def test_a_worker_that_restarts_for_ever_is_bounded() -> None:
    book = PoolBook(POOL)

    for number in range(100):
        put(book, f"r/{number}", candidate("a", incarnation=f"life-{number}"))

    assert len(book._workers["a"].lives) == 8
    assert [row.nonce for row in book.pending(0.0)] == ["r/99"]


async def test_the_memory_ledger_counts_what_has_ended_by_now() -> None:
    clock = Clock()
    ledger = MemoryLedger(clock)
    await reserve_on(ledger, "r/1", [candidate("a")], ttl_s=1.0)
    await ledger.reserve("other", [candidate("b")], NEED, nonce="r/1", ttl_s=5.0)
    assert ledger.num_open == 2

    clock.now_s = 1.0

    assert (ledger.num_open, ledger.num_expired) == (1, 1)


def test_a_heartbeat_of_one_issuer_covers_what_it_names() -> None:
    seen = Admitted(issuer="i", through=3, beyond=(5, 9))

    assert [sequence for sequence in range(1, 12) if seen.covers(sequence)] == [1, 2, 3, 5, 9]
