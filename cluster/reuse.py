"""When a worker fetches a prefix that another one holds instead of computing it, and from whom.

Both ways are priced in prompt tokens that the worker could compute in the same time, so that a price can be added to
any other cost of routing. A price is continuous in what everybody holds: nothing jumps where fetching begins to pay.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Verdict = Literal["nothing", "compute", "fetch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBytes:
    """Size of one KV group."""

    token_bytes: int
    window: int | None = None
    """Only the last so many tokens of a prefix are needed; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRates:
    """What a worker has measured of itself; None: not yet."""

    prefill_tokens_s: float | None = None
    transfer_bytes_s: float | None = None
    groups: tuple[GroupBytes, ...] = ()

    def bytes_between(self, have: int, get: int) -> int:
        """Bytes to read so that a prefix of `have` tokens becomes one of `get`."""
        return sum(
            group.token_bytes * max(0, get - (have if group.window is None else max(have, get - group.window)))
            for group in self.groups
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseRules:
    """The configured side of a price; see ReuseConfig."""

    min_tokens: int = 64
    assumed_prefill_tokens_s: float = 2000.0
    assumed_transfer_bytes_s: float = 1e9
    overhead_s: float = 0.01
    margin: float = 0.25
    max_sources: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A worker and the leading prompt tokens that it is believed to hold."""

    worker_id: str
    num_tokens: int
    load: float = 0.0
    """Of two that hold the same, the less loaded is asked first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReusePlan:
    """What was decided about one worker's missing prefix, and by which numbers."""

    verdict: Verdict = "nothing"
    """nothing: nobody else holds more. compute: fetching would cost more. fetch: it is fetched."""
    gained_tokens: int = 0
    """What the best holder has more."""
    price_tokens: float = 0.0
    """What fetching that costs."""
    min_tokens: int = 1
    """With fetch: when fewer than so many turn out to be missing, it pays no more."""
    sources: tuple[str, ...] = ()
    """With fetch: worker ids, best first."""

    @property
    def saved_tokens(self) -> float:
        """How much cheaper the prompt is than computed from what is here; >= 0."""
        return max(0.0, self.gained_tokens - self.price_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePart:
    """Blocks [first, end) of a prefix, to be read from one source."""

    source: int
    """Index into the sources."""
    first: int
    end: int


def price_tokens(rates: WorkerRates, rules: ReuseRules, have: int, get: int) -> float:
    """Price the fetch that makes a prefix of `have` tokens one of `get`, in prompt tokens; at least `min_tokens`."""
    transfer_bytes_s = rates.transfer_bytes_s or rules.assumed_transfer_bytes_s
    prefill_tokens_s = rates.prefill_tokens_s or rules.assumed_prefill_tokens_s
    seconds = rates.bytes_between(have, get) / transfer_bytes_s + rules.overhead_s
    return max(float(rules.min_tokens), seconds * (1.0 + rules.margin) * prefill_tokens_s)


def assess_reuse(have: int, best: int, prompt_tokens: int, rates: WorkerRates, rules: ReuseRules) -> ReusePlan:
    """Decide whether a worker fetches what it lacks of a prompt's prefix; sources are left open.

    Args:
        have: Leading tokens that it holds.
        best: The most leading tokens that another worker with the same layout holds.
        prompt_tokens: Length of the prompt; its last token is always computed.
        rates: The worker's own.
        rules: What is configured.
    """
    get = min(best, prompt_tokens - 1)
    if get <= have:
        return ReusePlan()
    gained, price = get - have, price_tokens(rates, rules, have, get)
    return ReusePlan(verdict="fetch" if gained > price else "compute", gained_tokens=gained, price_tokens=price)


def plan_reuse(
    have: int, holders: Sequence[Holder], prompt_tokens: int, rates: WorkerRates, rules: ReuseRules
) -> ReusePlan:
    """Do what `assess_reuse` does, and say whom to ask.

    Args:
        have: Leading tokens that the worker holds.
        holders: Other workers with the same layout, best first.
        prompt_tokens: Length of the prompt.
        rates: The worker's own.
        rules: What is configured.
    """
    plan = assess_reuse(have, holders[0].num_tokens if holders else 0, prompt_tokens, rates, rules)
    if plan.verdict != "fetch":
        return plan
    useful = [holder.worker_id for holder in holders[: rules.max_sources] if holder.num_tokens > have]
    min_tokens = _break_even(rates, rules, have, have + plan.gained_tokens)
    return replace(plan, min_tokens=min_tokens, sources=tuple(useful))


def best_first(holders: Iterable[Holder]) -> list[Holder]:
    """Order by what they hold, then by load."""
    return sorted(holders, key=lambda holder: (-holder.num_tokens, holder.load, holder.worker_id))


def split_sources(first: int, held: Sequence[int], min_blocks: int) -> list[SourcePart]:
    """Cut the blocks from `first` to the longest of `held` into one part per source, in order, as even as can be.

    Args:
        first: Blocks before it are not wanted.
        held: Leading blocks of each source.
        min_blocks: A part smaller than this is not worth a source of its own.
    """
    # Who holds little can only give the beginning; the longest takes what is left.
    order = sorted((i for i, blocks in enumerate(held) if blocks > first), key=lambda i: (held[i], -i))
    if not order:
        return []
    end = held[order[-1]]
    room = max(1, (end - first) // max(1, min_blocks))
    parts: list[SourcePart] = []
    chosen = order[-room:]
    for number, source in enumerate(chosen):
        share = -(-(end - first) // (len(chosen) - number))
        stop = end if source == chosen[-1] else min(first + share, held[source])
        if stop > first:
            parts.append(SourcePart(source=source, first=first, end=stop))
            first = stop
    return parts


def _break_even(rates: WorkerRates, rules: ReuseRules, have: int, get: int) -> int:
    """Fewest tokens whose fetch pays; the price grows more slowly than what is gained, so there is one boundary."""
    low, high = 0, get - have
    while high - low > 1:
        middle = (low + high) // 2
        if middle > price_tokens(rates, rules, get - middle, get):
            high = middle
        else:
            low = middle
    return high
