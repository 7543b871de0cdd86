import pytest

from kv_store.lease import Lease, heartbeat_period_s


def test_a_lease_lasts_its_duration() -> None:
    lease = Lease.granted(30.0, 100.0)

    assert not lease.is_over(129.9)
    assert lease.is_over(130.0)


def test_a_heartbeat_extends_to_two_thirds_of_the_duration_from_now() -> None:
    """Rule 3."""
    lease = Lease.granted(30.0, 100.0).extended(125.0)

    assert lease.expires_at_s == pytest.approx(145.0)


def test_an_early_heartbeat_does_not_shorten_a_lease() -> None:
    lease = Lease.granted(30.0, 100.0).extended(101.0)

    assert lease.expires_at_s == 130.0


def test_renewing_starts_the_whole_duration_again() -> None:
    lease = Lease.granted(30.0, 100.0).renewed(110.0)

    assert lease.expires_at_s == 140.0


def test_several_heartbeats_can_be_lost_before_a_lease_ends() -> None:
    """Rule 3: one is due in every sixth of the lease."""
    period_s = heartbeat_period_s(30.0)
    lease = Lease.granted(30.0, 0.0).extended(30.0 - period_s)

    assert period_s == 5.0
    assert not lease.is_over(30.0 - period_s + 3 * period_s)
