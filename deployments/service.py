"""What the doors ask of the system: a prompt in, chunks of text out."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

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
    content: str


Prompt = str | tuple[int, ...] | tuple[ChatTurn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """A validated request, still in the client's words; the service tokenizes it once."""

    prompt: Prompt
    model: str | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    timeout_s: float | None = None
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """How one request ended, what it cost and how its KV moved."""

    reason: FinishReason
    usage: Usage
    provenance: Provenance
    first_token_s: float
    total_s: float
    stop: str | None = None
    """The stop string that ended the text, if one did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """New text and tokens; the last chunk of a request, and only it, has `finish`."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish: Finish | None = None


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
