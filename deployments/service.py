"""What the doors ask of the system: a prompt in, chunks of text out."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from cluster.explanation import PlacementExplanation
from messages.requests import Grammar
from messages.tokens import FinishReason, Provenance, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A model as a client sees it."""

    name: str
    context_length: int
    """Most tokens of prompt and output together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """One message of a conversation."""

    role: str
    """system, user, assistant or tool."""
    content: str
    tool_call_id: str = ""
    """In a turn of a tool: the call that it answers; for the chat template, empty is none."""


Prompt = str | tuple[int, ...] | tuple[ChatTurn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """A validated request, still in the client's words; the service tokenizes it once."""

    prompt: Prompt
    model: str | None = None
    max_tokens: int | None = None
    """None: what the context still holds."""
    min_tokens: int = 0
    """The first `min_tokens` tokens neither are an end or stop token nor complete a stop string."""
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias), each id once."""
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    grammar: Grammar | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    """The text ends with what stopped it: the stop string, or the text of the client's stop token."""
    ignore_eos: bool = False
    """The model's own end tokens end nothing."""
    logprobs: int | None = None
    """Log probabilities of each token and of so many most likely ones; None: none."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens."""
    echo: bool = False
    """The text of every choice begins with the prompt."""
    priority: int = 0
    """Lower goes first."""
    timeout_s: float | None = None
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredToken:
    """A token, what it adds to the text, and its log probability."""

    token_id: int
    text: str
    """With U+FFFD where the token is only a part of a code point; a control token by its name."""
    data: bytes
    """UTF-8, or a part of it."""
    logprob: float
    top: tuple["ScoredToken", ...] = ()
    """The most likely tokens at this place, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """How one choice ended."""

    reason: FinishReason
    stop: str | int | None = None
    """The stop string or the client's stop token that ended it; None: an end token of the model, or the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What one request cost, all choices together, and how its KV moved."""

    usage: Usage
    provenance: Provenance
    first_token_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """New text and tokens of one choice.

    The last chunk of each choice, and only it, has `finish`; the last of the request, and only it, has `summary`.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    choice: int = 0
    logprobs: tuple[ScoredToken, ...] = ()
    """One per token of `token_ids` when asked for, else empty."""
    prompt_logprobs: tuple[ScoredToken | None, ...] = ()
    """Only of choice 0, in parts: over the stream one per prompt token, None for the first of them."""
    finish: Finish | None = None
    summary: Summary | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Where a request would run, and why."""

    prompt_tokens: int
    placement: PlacementExplanation


class GenerationService(Protocol):
    """The system behind the doors."""

    def models(self) -> list[ModelCard]:
        """Models that can be asked for."""
        ...

    def is_ready(self) -> bool:
        """Whether at least one worker of every role that a request needs takes work."""
        ...

    def generate(self, spec: GenerationSpec) -> AsyncIterator[Chunk]:
        """Run one request; closing the iterator aborts it everywhere.

        Raises:
            InvalidRequest: A field is out of its limits; the context's `param` names it.
            ModelNotFound: `spec.model` is not served.
            ServingError: Any other class of messages/errors.py, before or between chunks.
        """
        ...

    async def explain(self, spec: GenerationSpec) -> Explanation:
        """Say where a request would run if it came now; nothing runs and nothing is reserved.

        Raises:
            InvalidRequest: As in `generate`.
            ModelNotFound: As in `generate`.
            Unavailable: Nobody could be chosen.
            ServingError: Any other class of messages/errors.py.
        """
        ...
