"""How long an owner keeps its promise: a duration on the owner's own clock, extended by heartbeats."""

from dataclasses import dataclass

HEARTBEATS_PER_LEASE = 6
EXTENSION_SHARE = 2 / 3
"""A heartbeat extends to this share of the duration from now, so a dead reader costs less than a fresh lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A promise that ends at `expires_at_s`; renewing gives a later one, never an earlier one."""

    duration_s: float
    expires_at_s: float

    @staticmethod
    def granted(duration_s: float, now_s: float) -> "Lease":
        """A lease that begins now."""
        return Lease(duration_s=duration_s, expires_at_s=now_s + duration_s)

    def renewed(self, now_s: float) -> "Lease":
        """The lease after its holder made a call that starts it again."""
        return self._until(now_s + self.duration_s)

    def extended(self, now_s: float) -> "Lease":
        """The lease after a heartbeat."""
        return self._until(now_s + self.duration_s * EXTENSION_SHARE)

    def is_over(self, now_s: float) -> bool:
        """Whether the promise has ended."""
        return now_s >= self.expires_at_s

    def _until(self, expires_at_s: float) -> "Lease":
        return Lease(duration_s=self.duration_s, expires_at_s=max(self.expires_at_s, expires_at_s))


def heartbeat_period_s(lease_s: float) -> float:
    """How often a holder should say that it is alive."""
    return lease_s / HEARTBEATS_PER_LEASE
