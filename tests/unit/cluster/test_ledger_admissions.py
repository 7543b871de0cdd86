"""What a worker says of the reservations that it has admitted."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.admission_log import MAX_BEYOND, MAX_ISSUERS, AdmissionLog
from messages.reservations import Admitted


def row_of(log: AdmissionLog) -> Admitted:
    (row,) = log.admitted()
    return row


def test_nothing_has_come_at_first() -> None:
    assert AdmissionLog().admitted() == ()


def test_what_comes_in_order_is_one_number() -> None:
    log = AdmissionLog()

    for sequence in (1, 2, 3):
        log.admit("i", sequence)

    assert log.admitted() == (Admitted(issuer="i", through=3),)


def test_who_comes_early_is_named_until_the_others_have_come() -> None:
    log = AdmissionLog()
    for sequence in (4, 2, 6):
        log.admit("i", sequence)
    assert row_of(log) == Admitted(issuer="i", through=0, beyond=(2, 4, 6))

    log.admit("i", 1)
    assert row_of(log) == Admitted(issuer="i", through=2, beyond=(4, 6))

    log.admit("i", 3)
    assert row_of(log) == Admitted(issuer="i", through=4, beyond=(6,))


def test_coming_twice_is_coming_once() -> None:
    log = AdmissionLog()
    for sequence in (1, 1, 3, 3, 1):
        log.admit("i", sequence)

    assert row_of(log) == Admitted(issuer="i", through=1, beyond=(3,))


def test_who_never_comes_is_given_up_when_too_many_wait() -> None:
    log = AdmissionLog(max_beyond=3)
    for sequence in (1, 3, 4, 6):
        log.admit("i", sequence)
    assert row_of(log) == Admitted(issuer="i", through=1, beyond=(3, 4, 6))

    log.admit("i", 8)

    assert row_of(log) == Admitted(issuer="i", through=4, beyond=(6, 8))


def test_issuers_number_for_themselves() -> None:
    log = AdmissionLog()
    log.admit("shared", 1)
    log.admit("local", 2)
    log.admit("shared", 2)

    assert log.admitted() == (Admitted(issuer="local", through=0, beyond=(2,)), Admitted(issuer="shared", through=2))


def test_of_many_issuers_the_one_that_was_silent_for_longest_is_forgotten() -> None:
    log = AdmissionLog()
    for number in range(MAX_ISSUERS):
        log.admit(f"i{number}", 1)
    log.admit("i0", 2)

    log.admit("one more", 1)

    names = [row.issuer for row in log.admitted()]
    assert len(names) == MAX_ISSUERS
    assert "i1" not in names
    assert "i0" in names


@given(
    order=st.permutations(range(1, 41)),
    missing=st.sets(st.integers(1, 40), max_size=5),
)
def test_in_any_order_exactly_those_that_came_are_covered_and_the_size_is_bounded(
    order: list[int], missing: set[int]
) -> None:
    """Rule 16."""
    log = AdmissionLog(max_beyond=40)
    bounded = AdmissionLog(max_beyond=4)
    come: set[int] = set()

    for sequence in order:
        if sequence in missing:
            continue
        come.add(sequence)
        log.admit("i", sequence)
        bounded.admit("i", sequence)
        row, short = row_of(log), row_of(bounded)

        assert {number for number in range(1, 50) if row.covers(number)} == come
        assert all(short.covers(number) for number in come)
        assert len(short.beyond) <= 4
        assert list(short.beyond) == sorted(set(short.beyond))
        assert not short.covers(max(come) + 1)


def test_a_log_with_gaps_stays_small_for_ever() -> None:
    log = AdmissionLog()

    for sequence in range(1, 20_000, 2):
        log.admit("i", sequence)

    row = row_of(log)
    assert len(row.beyond) == MAX_BEYOND
    assert row.beyond[-1] == 19_999
