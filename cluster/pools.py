"""Pools of workers and which requests each takes: by prompt tokens still to compute, and by tokens of the context.

A prompt of 100,000 tokens of which 99,000 are cached is short for prefill and long for KV: the first range decides who
computes it, the second who holds it. All bounds are inclusive.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

Role = Literal["prefill", "decode", "unified"]
PromptClass = Literal["short", "long"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """A group of equal workers."""

    name: str
    role: Role
    min_prefill_tokens: int = 0
    """Fewest uncached prompt tokens of a prefill that this pool takes."""
    max_prefill_tokens: int | None = None
    """Most of them; None: no limit."""
    min_context_tokens: int = 0
    """Fewest tokens of the whole prompt, cached or not, of a request that this pool takes."""
    max_context_tokens: int | None = None
    """Most of them; None: no limit."""
    max_queue_tokens: int | None = None
    """Prompt tokens that may wait at one worker before it counts as full; None: it is never full."""

    @property
    def can_prefill(self) -> bool:
        """Whether its workers compute prompts for others or for themselves."""
        return self.role in ("prefill", "unified")

    @property
    def can_decode(self) -> bool:
        """Whether its workers generate."""
        return self.role in ("decode", "unified")

    def takes(self, prefill_tokens: int, context_tokens: int | None = None) -> bool:
        """Whether a prefill belongs here.

        Args:
            prefill_tokens: Prompt tokens that are uncached.
            context_tokens: Tokens of the whole prompt; None: as many as are uncached.
        """
        context = prefill_tokens if context_tokens is None else context_tokens
        return self.can_prefill and self._computes(prefill_tokens) and self._holds(context)

    def decodes(self, context_tokens: int, prefill_tokens: int | None = None) -> bool:
        """Whether the decode of a request belongs here.

        Args:
            context_tokens: Tokens of the whole prompt.
            prefill_tokens: Those that are uncached, if a unified pool would have to compute them itself; None: others
                can.
        """
        computes = self.role == "decode" or prefill_tokens is None or self._computes(prefill_tokens)
        return self.can_decode and computes and self._holds(context_tokens)

    def _computes(self, tokens: int) -> bool:
        return _is_within(tokens, self.min_prefill_tokens, self.max_prefill_tokens)

    def _holds(self, tokens: int) -> bool:
        return _is_within(tokens, self.min_context_tokens, self.max_context_tokens)


def classify(prefill_tokens: int, long_prefill_tokens: int) -> PromptClass:
    """Name the class of a prefill: long means more than `long_prefill_tokens` uncached tokens."""
    return "long" if prefill_tokens > long_prefill_tokens else "short"


def has_prefill_pool(pools: Iterable[PoolSpec]) -> bool:
    """Whether unified pools can leave prompts to others, so that they may decode what they would not prefill."""
    return any(pool.role == "prefill" for pool in pools)


def first_gap(pools: Sequence[PoolSpec]) -> tuple[Literal["prefill", "decode"], int, int] | None:
    """Find a request that no pool takes.

    Returns:
        What of it nobody does, its uncached and its whole prompt tokens, the smallest such ones; None: there is none.
    """
    # Between two neighbouring edges nothing changes, so the edges stand for all lengths.
    edges = sorted({1}.union(*(_edges(pool) for pool in pools)))
    has_prefill = has_prefill_pool(pools)
    for context in edges:
        for uncached in edges:
            if uncached > context:
                break
            if not any(pool.takes(uncached, context) for pool in pools):
                return "prefill", uncached, context
            if not any(pool.decodes(context, None if has_prefill else uncached) for pool in pools):
                return "decode", uncached, context
    return None


def prefill_boundaries(pools: Iterable[PoolSpec]) -> tuple[int, ...] | None:
    """Where the prefill ranges of `pools` meet, ascending, when they follow one another without gap or overlap.

    Pools without any bound take everything and are left out; several pools may share one range.

    Returns:
        The largest prefill of each range but the last; None when the ranges are no such chain of two or more.
    """
    ranges = prefill_chain(pools)
    if len(ranges) < 2 or ranges[0][0] > 1 or ranges[-1][1] is not None:
        return None
    if any(before[1] is None or before[1] + 1 != after[0] for before, after in pairwise(ranges)):
        return None
    return tuple(most for _, most in ranges if most is not None)


def prefill_chain(pools: Iterable[PoolSpec]) -> list[tuple[int, int | None]]:
    """The different prefill ranges of `pools`, ascending; those without any bound left out."""
    bounds = {_prefill_range(pool) for pool in pools if pool.can_prefill}
    return sorted((bound for bound in bounds if bound[0] > 1 or bound[1] is not None), key=lambda bound: bound[0])


def with_boundaries(pools: Sequence[PoolSpec], boundaries: Sequence[int]) -> tuple[PoolSpec, ...]:
    """Move the prefill ranges of pools that form a chain (see `prefill_boundaries`).

    Args:
        pools: All pools; those outside the chain stay as they are.
        boundaries: The largest prefill of each range but the last, strictly ascending.
    """
    chain = prefill_chain(pools)
    assert len(boundaries) == len(chain) - 1, "one boundary between each two ranges"
    least = [chain[0][0], *(boundary + 1 for boundary in boundaries)]
    moved = dict(zip(chain, zip(least, [*boundaries, None], strict=True), strict=True))
    return tuple(
        replace(pool, min_prefill_tokens=moved[bounds][0], max_prefill_tokens=moved[bounds][1])
        if pool.can_prefill and (bounds := _prefill_range(pool)) in moved
        else pool
        for pool in pools
    )


def _is_within(tokens: int, least: int, most: int | None) -> bool:
    return least <= tokens and (most is None or tokens <= most)


def _prefill_range(pool: PoolSpec) -> tuple[int, int | None]:
    return pool.min_prefill_tokens, pool.max_prefill_tokens


def _edges(pool: PoolSpec) -> set[int]:
    """Lengths from which on `pool` takes or refuses."""
    ends = {most + 1 for most in (pool.max_prefill_tokens, pool.max_context_tokens) if most is not None}
    return {length for length in {pool.min_prefill_tokens, pool.min_context_tokens} | ends if length >= 1}
