"""Pools of workers and which prefills each takes, by the prompt tokens that are still to be computed."""

from dataclasses import dataclass
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
    """Most of them, inclusive; None: no limit."""

    @property
    def can_prefill(self) -> bool:
        """Whether its workers compute prompts for others or for themselves."""
        return self.role in ("prefill", "unified")

    @property
    def can_decode(self) -> bool:
        """Whether its workers generate."""
        return self.role in ("decode", "unified")

    def takes(self, prefill_tokens: int) -> bool:
        """Whether a prefill of so many uncached tokens belongs here."""
        return self.can_prefill and (
            self.min_prefill_tokens <= prefill_tokens
            and (self.max_prefill_tokens is None or prefill_tokens <= self.max_prefill_tokens)
        )


def classify(prefill_tokens: int, long_prefill_tokens: int) -> PromptClass:
    """Name the class of a prefill: long means more than `long_prefill_tokens` uncached tokens."""
    return "long" if prefill_tokens > long_prefill_tokens else "short"
