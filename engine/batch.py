"""What one forward pass sees: rows of new tokens, each with its request's blocks."""

from dataclasses import dataclass

from messages.handoff import BlockId
from messages.requests import RequestId, SamplingParams


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
    choice: int = 0

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
