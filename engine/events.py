"""What an engine tells its worker after a step or a command."""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_store.local_cache import CacheChanges, GroupCounts
from messages.errors import ServingError
from messages.handoff import BlockId, BlockKey, BlockRef
from messages.requests import RequestId
from messages.tokens import TokenEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The request has its blocks and will be computed."""

    request_id: RequestId
    cached_tokens: int
    """Prompt tokens whose KV is here already: hit, or borrowed."""
    num_given_tokens: int
    groups: tuple[tuple[BlockRef | None, ...], ...] | None = None
    """The prompt's blocks, for a hand-off; None unless the part is PREFILL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """A DECODE part has blocks to pull into."""

    request_id: RequestId
    cached_tokens: int
    groups: tuple[tuple[BlockId | None, ...], ...]
    """Per KV group and logical block the destination; None: already here, or a hole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Borrowing:
    """A request waits for a prefix that other workers may lend; Accepted or Failed follows when that is over."""

    request_id: RequestId
    cached_tokens: int
    keys: tuple[BlockKey, ...]
    """Of the leading blocks up to the end of what is wanted."""
    groups: tuple[tuple[BlockId | None, ...], ...]
    """Per KV group and logical block the destination; None: already here, or a hole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lent:
    """The answer to a lend: cached blocks that stay as they are until the lend is ended."""

    request_id: RequestId
    """The lend's id."""
    num_tokens: int
    """Leading tokens whose KV is here; 0: nothing is lent, and nothing is to be ended."""
    groups: tuple[tuple[BlockRef | None, ...], ...]
    """Per KV group and logical block; None: not asked for, or a hole that a hit of `num_tokens` does not need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """`complete_tokens` prompt tokens of a PREFILL part have their KV."""

    request_id: RequestId
    complete_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkDone:
    """What this worker did for the request; the next token event of the request is the last one here."""

    request_id: RequestId
    is_held: bool
    """The blocks stay for a hand-off."""
    computed_prompt_tokens: int
    queue_s: float
    prefill_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The request is over here and holds nothing."""

    request_id: RequestId
    error: ServingError


EngineEvent = Accepted | Allocated | Borrowing | Lent | Progress | WorkDone | TokenEvent | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSnapshot:
    """How busy an engine is."""

    groups: tuple[GroupCounts, ...]
    running: int
    waiting: int
    held: int
    """Finished prefills whose blocks a hand-off still holds, and prefixes that are lent."""
    queued_prefill_tokens: int
    context_tokens: int
    """Tokens of KV that running requests attend to."""
    counters: dict[str, float]
    """Monotonic counters by metric name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Everything one turn of the loop gives."""

    events: Sequence[EngineEvent]
    changes: CacheChanges
    load: LoadSnapshot
    num_submitted: int = 0
    """Requests that were ever submitted and that `load` has taken in; in the order of `EngineLoop.submit`."""
