"""A generation request as it travels between gateway and workers."""

from dataclasses import dataclass
from typing import NewType

RequestId = NewType("RequestId", str)
"""Unique inside the cluster: made by the gateway, never the client's own id. Attempt n of it ends in `.n`."""


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
    seed: int | None = None
    """None: the gateway draws one, so that a hand-off and a replay sample alike."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; matched by the gateway, not part of the output."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end generation, the model's own end tokens among them; emitted last, not part of the text."""


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
    salt: bytes = b""
    """Cache salt derived from the tenant on the server; part of every block key."""
    adapter: Adapter | None = None
    timeout_s: float | None = None
    """Remaining time, a duration on the receiver's own clock."""
    priority: int = 0
