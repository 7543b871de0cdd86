"""What a worker says about a running request."""

from dataclasses import dataclass
from enum import StrEnum

from messages.requests import RequestId


class FinishReason(StrEnum):
    """Why a choice ended well; failures are errors, not finish reasons."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token's log probability under the model, before temperature, penalties and filters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens and their log probabilities, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """One or more tokens of one choice; the last event of a choice carries `finish_reason`."""

    request_id: RequestId
    first_index: int
    """Position of `token_ids[0]` in the choice's output; a receiver drops what it has already seen."""
    token_ids: tuple[int, ...]
    choice: int = 0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The client's stop token that ended the choice; None for the model's own end tokens."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token when the request asks for them, else empty."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    """Only in the first event of choice 0, when asked for: one per prompt token, None for the very first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a finished request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was found, not computed, before the prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where the KV of one request came from and how it moved."""

    prefill_worker: str = ""
    decode_worker: str = ""
    prefill_computed_tokens: int = 0
    decode_computed_tokens: int = 0
    """Prompt tokens that the decode worker ran itself."""
    blocks_moved: int = 0
    bytes_moved: int = 0
    transfer_s: float = 0.0
    """Sum of the durations of the reads."""
    exposed_s: float = 0.0
    """Time between token 1 being known to the decode worker and its KV being committed there."""
    reused_from: tuple[str, ...] = ()
    """Workers that lent a prefix to the one that computed the prompt, in the order of the blocks."""
    reused_tokens: int = 0
    """Prompt tokens that were borrowed so, not computed."""
    num_replays: int = 0
    """How often another worker took over after one was lost; the rest then tells of the last ones."""
