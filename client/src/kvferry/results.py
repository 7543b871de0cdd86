"""What comes back: chunks while texts grow, a Completion when they have ended, the models that are served."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kvferry.v1 import inference_pb2 as v1

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FinishReason = Literal["stop", "length", "unknown"]
"""`stop`: an end or stop token, or a stop string; `length`: max_tokens or the context's end; `unknown`: a newer one."""

_REASONS: dict[int, FinishReason] = {v1.FINISH_REASON_STOP: "stop", v1.FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token's log probability under the model, before temperature, penalties and filters."""

    token_id: int
    text: str
    """What the token adds to the text, with U+FFFD where it is a part of a code point; a control token by its name."""
    text_bytes: bytes
    """UTF-8, or a part of it."""
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    """The most likely tokens at this place, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """New text of one choice and the tokens that made it; `str(chunk)` is the text."""

    text: str
    """Empty while a code point or a possible stop string is incomplete."""
    token_ids: tuple[int, ...]
    choice: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token, when asked for."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    """Of all choices together."""
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
    reused_from: tuple[str, ...] = ()
    """Workers that lent a prefix to the one that computed the prompt, in the order of the prompt."""
    reused_tokens: int = 0
    """Prompt tokens that were read from them instead of computed."""
    num_replays: int = 0
    """How often another worker took over after one was lost; the rest then tells of the last ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Durations on the gateway's clock."""

    first_token_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One finished text; `str(choice)` is the text."""

    text: str
    token_ids: tuple[int, ...] = field(repr=False)
    finish_reason: FinishReason
    stop: str | int | None
    """The stop string or stop token id of the request that ended it; None: the model's own end, or the limit."""
    logprobs: tuple[TokenLogprob, ...] = field(default=(), repr=False)
    """One per token, when asked for."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Everything that one call brought; `str(completion)` is the text of choice 0."""

    choices: tuple[Choice, ...]
    """As many as `n` asked for, at least one."""
    usage: Usage
    provenance: Provenance
    timings: Timings
    request_id: str
    """The server's name of the request; quote it in a report."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] = field(default=(), repr=False)
    """One per prompt token, when asked for; None for the first of them."""

    @property
    def text(self) -> str:
        """Of choice 0."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of choice 0."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Of choice 0."""
        return self.choices[0].finish_reason

    @property
    def stop(self) -> str | int | None:
        """Of choice 0."""
        return self.choices[0].stop

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Of choice 0."""
        return self.choices[0].logprobs

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A model that is served."""

    name: str
    context_length: int
    """Most tokens of prompt and output together."""


@dataclass(slots=True)
class GrowingChoice:
    """What has arrived of one choice."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: v1.Finish | None = None

    def add(self, message: v1.GenerateChunk) -> Chunk:
        """Take in a message of this choice."""
        logprobs = tuple(_logprob_of(entry) for entry in message.logprobs)
        self.pieces.append(message.text)
        self.token_ids.extend(message.token_ids)
        self.logprobs.extend(logprobs)
        if message.HasField("finish"):
            self.finish = message.finish
        return Chunk(text=message.text, token_ids=tuple(message.token_ids), choice=message.choice, logprobs=logprobs)

    @property
    def text(self) -> str:
        """What has arrived so far."""
        return "".join(self.pieces)

    def choice(self, finish: v1.Finish) -> Choice:
        """The finished choice."""
        stops: dict[str, str | int] = {"stop_string": finish.stop_string, "stop_token_id": finish.stop_token_id}
        return Choice(
            text=self.text,
            token_ids=tuple(self.token_ids),
            finish_reason=_REASONS.get(finish.reason, "unknown"),
            stop=stops.get(finish.WhichOneof("stop") or ""),
            logprobs=tuple(self.logprobs),
        )


def prompt_logprobs_of(messages: Iterable[v1.TokenLogprob]) -> list[TokenLogprob | None]:
    """A part of a prompt's log probabilities."""
    return [_logprob_of(entry) if entry.HasField("logprob") else None for entry in messages]


def completion_of(
    summary: v1.Summary,
    *,
    choices: Sequence[Choice],
    prompt_logprobs: Sequence[TokenLogprob | None],
    request_id: str,
) -> Completion:
    """Put what the stream carried and its last message together."""
    usage, moved, timings = summary.usage, summary.provenance, summary.timings
    return Completion(
        choices=tuple(choices),
        prompt_logprobs=tuple(prompt_logprobs),
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
            reused_from=tuple(moved.reused_from),
            reused_tokens=moved.reused_tokens,
            num_replays=moved.replays,
        ),
        timings=Timings(first_token_s=timings.first_token_seconds, total_s=timings.total_seconds),
        request_id=request_id,
    )


def _logprob_of(message: v1.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(
        token_id=message.token_id,
        text=message.text,
        text_bytes=message.text_bytes,
        logprob=message.logprob,
        top=tuple(_logprob_of(entry) for entry in message.top),
    )
