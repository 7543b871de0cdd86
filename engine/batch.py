"""What one forward pass sees: rows of new tokens, each with its request's blocks, and what it gives back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch

from messages.handoff import BlockId
from messages.requests import RequestId, SamplingParams
from messages.tokens import TokenLogprob


class Matcher(Protocol):
    """Which tokens a grammar allows next, for one choice."""

    def fill_mask(self, allowed: torch.Tensor) -> None:
        """Write which tokens may come next.

        Args:
            allowed: (V,), bool; every entry is written.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Go on by one token that was allowed."""
        ...

    def fork(self) -> Self:
        """An independent matcher in the same state."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The tokens of one request that this step computes; position `start` onward."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    start: int
    """Position of `token_ids[0]`; tokens before it have their KV in the blocks."""
    block_ids: tuple[tuple[BlockId | None, ...], ...]
    """Per KV group, per logical block; covers `start + len(token_ids)` tokens. None: a hole outside the window."""
    sampling: SamplingParams | None
    """None when the last token's logits are not needed (an unfinished prompt)."""
    choices: tuple[int, ...] = (0,)
    """Choices to sample from the last token's logits; several only at the end of a prompt."""
    prompt: Sequence[int] = ()
    """The whole prompt; not to be changed."""
    generated: Sequence[int] = ()
    """Tokens generated so far, those of this row among them; not to be changed."""
    matcher: Matcher | None = None
    """The grammar's state; None: any token may come."""
    targets: tuple[int, ...] = ()
    """Prompt tokens whose log probabilities are wanted: those that follow `token_ids[0]`, `token_ids[1]`, ..."""
    num_prompt_logprobs: int = 0
    """Most likely tokens to list for each of `targets`."""

    @property
    def end(self) -> int:
        """Context length after this step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of one step; those with one token (decodes) come first."""

    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward pass computes."""
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Tokens chosen for one choice: one, or more when drafted tokens were accepted."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token when the request asks for them, else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """What a step gives for one row."""

    samples: tuple[Sampled, ...] = ()
    """One per entry of the row's `choices`; empty when the row does not sample."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """One per entry of the row's `targets`."""
