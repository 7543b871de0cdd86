"""Which workers are believed to hold a prompt's prefix; a hint that the lender checks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSource:
    """One life of a worker that may lend leading blocks of a prompt."""

    worker_id: str
    incarnation: str
    address: str
    """host:port of its internal gRPC server."""
    num_blocks: int
    """Leading blocks that the registry says it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseOffer:
    """What a request may borrow, and when that pays."""

    sources: tuple[PrefixSource, ...] = ()
    """Best first."""
    min_tokens: int = 1
    """Fetching fewer tokens than this costs more than computing them."""
