"""What comes back: chunks while a text grows, a Completion when it has ended, the models that are served."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kvferry.v1 import inference_pb2 as v1

if TYPE_CHECKING:
    from collections.abc import Sequence

FinishReason = Literal["stop", "length", "unknown"]
"""`stop`: an end token or a stop string; `length`: max_tokens or the context's end; `unknown`: a newer one."""

_REASONS: dict[int, FinishReason] = {v1.FINISH_REASON_STOP: "stop", v1.FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """New text and the tokens that made it; `str(chunk)` is the text."""

    text: str
    """Empty while a code point or a possible stop string is incomplete."""
    token_ids: tuple[int, ...]

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was reused, not computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where the request's KV came from and how it moved."""

    prefill_worker: str
    decode_worker: str
    prefill_computed_tokens: int
    decode_computed_tokens: int
    """Prompt tokens that the decode worker ran itself."""
    blocks_moved: int
    bytes_moved: int
    transfer_s: float
    exposed_s: float
    """Transfer time that the first decode step had to wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Durations on the gateway's clock."""

    first_token_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished text; `str(completion)` is the text."""

    text: str
    token_ids: tuple[int, ...] = field(repr=False)
    finish_reason: FinishReason
    stop: str | None
    """The stop string that ended the text, if one did."""
    usage: Usage
    provenance: Provenance
    timings: Timings
    request_id: str
    """The server's name of the request; quote it in a report."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A model that is served."""

    name: str
    context_length: int
    """Most tokens of prompt and output together."""


def completion_of(finish: v1.Finish, *, text: str, token_ids: Sequence[int], request_id: str) -> Completion:
    """Put what the stream carried and its last message together."""
    usage, moved, timings = finish.usage, finish.provenance, finish.timings
    return Completion(
        text=text,
        token_ids=tuple(token_ids),
        finish_reason=_REASONS.get(finish.reason, "unknown"),
        stop=finish.stop or None,
        usage=Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        ),
        provenance=Provenance(
            prefill_worker=moved.prefill_worker,
            decode_worker=moved.decode_worker,
            prefill_computed_tokens=moved.prefill_computed_tokens,
            decode_computed_tokens=moved.decode_computed_tokens,
            blocks_moved=moved.blocks_moved,
            bytes_moved=moved.bytes_moved,
            transfer_s=moved.transfer_seconds,
            exposed_s=moved.exposed_seconds,
        ),
        timings=Timings(first_token_s=timings.first_token_seconds, total_s=timings.total_seconds),
        request_id=request_id,
    )
