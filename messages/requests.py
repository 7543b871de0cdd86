"""A generation request as it travels between gateway and workers."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

RequestId = NewType("RequestId", str)
"""Unique inside the cluster: made by the gateway, never the client's own id. Attempt n of it ends in `.n`."""


class GrammarKind(StrEnum):
    """What a grammar's source is."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    """Any JSON object; the source is empty."""
    REGEX = "regex"
    CHOICE = "choice"
    """One of several texts; the source is a JSON list of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What the output must match, from its first token to its end."""

    kind: GrammarKind
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when generation ends."""

    max_tokens: int
    """Most tokens to generate, >= 1."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one, in [0, 1]."""
    seed: int | None = None
    """None: the gateway draws one, so that a hand-off and a replay sample alike."""
    n: int = 1
    """Choices; they share the prompt's KV."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token that was generated, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Taken off once per time a token was generated, in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output, > 0; 1 is off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, added to its logit), -100 to 100."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these may be sampled; None: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not be generated."""
    min_tokens: int = 0
    """End and stop tokens cannot be sampled before so many tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; matched by the gateway."""
    end_token_ids: tuple[int, ...] = ()
    """The model's own end tokens; empty when they are to be ignored. Emitted last, not part of the text."""
    stop_token_ids: tuple[int, ...] = ()
    """The client's; emitted last, not part of the text."""
    logprobs: int | None = None
    """Log probabilities of each sampled token and of so many most likely ones; None: none at all."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens. Such a prompt is computed whole, never taken from the prefix cache."""
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter by name and by content, so that a reload is another identity."""

    name: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt and what to do with it."""

    request_id: RequestId
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    generated_token_ids: tuple[int, ...] = ()
    """Tokens of its one choice that another worker generated before it was lost; the output goes on after them."""
    choice: int = 0
    """Number of the one choice of a replay; 0 in any other request, whose choices count from there."""
    salt: bytes = b""
    """Cache salt derived from the tenant on the server; part of every block key."""
    adapter: Adapter | None = None
    timeout_s: float | None = None
    """Remaining time, a duration on the receiver's own clock."""
    priority: int = 0

    @property
    def known_token_ids(self) -> tuple[int, ...]:
        """What a worker starts from: the prompt, and in a replay what was generated."""
        return self.prompt_token_ids + self.generated_token_ids
