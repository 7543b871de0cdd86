"""What gateways, ledger and workers say to each other about load that is on its way to a worker."""

import math
from dataclasses import dataclass

from messages.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one request will take of the worker that it goes to."""

    prefill_tokens: int
    """Prompt tokens that this worker will compute."""
    kv_tokens: int
    """Tokens that it will need new KV room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The reservations that a heartbeat of a worker counts in its load, of those that one issuer numbered."""

    issuer: str
    through: int
    """Every sequence up to this one, inclusive; 0 for none."""
    beyond: tuple[int, ...] = ()
    """Sequences above `through`, ascending; a few."""

    def covers(self, sequence: int) -> bool:
        """Whether the load has that reservation in it."""
        return sequence <= self.through or sequence in self.beyond


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One life of a worker that may take a request, as its newest heartbeat describes it."""

    worker_id: str
    incarnation: str
    cost: float
    """What placing the request here costs by that heartbeat, in any unit; finite. Lacking KV room is not in it: the
    ledger adds that, because it depends on what is pending."""
    cost_per_token: float
    """What each pending prefill token adds."""
    cost_per_request: float = 0.0
    """What each pending request adds, whatever it computes."""
    cost_per_lacking_token: float | None = None
    """What each KV token without room adds; None: `cost_per_token`, since what is preempted is computed again."""
    room_tokens: int
    """KV tokens that are free or evictable by that heartbeat."""
    admitted: tuple[Admitted, ...] = ()
    """The reservations that the heartbeat counts already, one entry per issuer."""

    def __post_init__(self) -> None:
        assert math.isfinite(self.cost), "a worker that must not be chosen is no candidate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Load that a ledger holds on one life of a worker until it ends, once: by release, with the worker, or by TTL."""

    nonce: str
    """Names it: one attempt of one request in one pool."""
    pool: str
    worker_id: str
    incarnation: str
    issuer: str
    """Who numbers the reservations of this life of the worker; a ledger that lost its data is another issuer."""
    sequence: int
    """>= 1, ascending without gaps for one life of a worker and one issuer; the worker says when it has admitted it."""
    prefill_tokens: int
    kv_tokens: int


MAX_TTL_S = 3600.0
"""A reservation bridges the time until its worker counts the request, which is seconds; none lives longer than this."""
OVERTAKEN_S = 10.0
"""A release that comes before its reserve, whose caller has left, is remembered for so long."""


def check_ttl(ttl_s: float) -> float:
    """Return `ttl_s` if a reservation may live so long.

    Raises:
        ConfigError: It may not.
    """
    if not 0 < ttl_s <= MAX_TTL_S:
        raise ConfigError(f"a reservation lives for more than 0 and at most {MAX_TTL_S:g} s", ttl_s=ttl_s)
    return ttl_s
