"""Log probabilities of tokens under the model alone: before temperature, penalties, masks and filters, in float32."""

from collections.abc import Sequence

import torch

from engine.batch import Row
from engine.ranking import best
from messages.tokens import TokenLogprob

_TILE_ELEMENTS = 2**22
"""Logits in float32 that are held at once, 16 MiB; a chunk of a prompt may have many times as many."""


def kept_places(row: Row) -> tuple[int, ...]:
    """Say after which of the row's new tokens logits are needed: one for each of `targets`, and one to sample from."""
    last = len(row.token_ids) - 1
    before_targets = tuple(range(len(row.targets)))
    is_extra = row.sampling is not None and len(row.targets) <= last
    return (*before_targets, last) if is_extra else before_targets


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[Sequence[int]], num_top: Sequence[int]
) -> list[tuple[TokenLogprob, ...]]:
    """Give tokens their log probabilities, beside those of the most likely tokens.

    Args:
        logits: (R, V) as the model gave them, any float dtype.
        token_ids: Per row of `logits`, the tokens in question.
        num_top: Per row, how many of the most likely tokens to list; 0 for none.

    Returns:
        Per row, one entry per token in question.
    """
    tile = max(1, _TILE_ELEMENTS // logits.shape[-1])
    found: list[tuple[TokenLogprob, ...]] = []
    for first in range(0, len(token_ids), tile):
        part = slice(first, first + tile)
        found.extend(_logprobs_of_tile(logits[part].float(), token_ids[part], num_top[part]))
    return found


def _logprobs_of_tile(
    logits: torch.Tensor, token_ids: Sequence[Sequence[int]], num_top: Sequence[int]
) -> list[tuple[TokenLogprob, ...]]:
    logprobs = logits.log_softmax(dim=-1)
    places = [(number, token_id) for number, ids in enumerate(token_ids) for token_id in ids]
    row_index, columns = torch.tensor(places, dtype=torch.long, device=logits.device).reshape(-1, 2).T
    chosen = iter(logprobs[row_index, columns].tolist())
    tops = _tops(logits, logprobs, num_top)
    return [
        tuple(TokenLogprob(token_id=token_id, logprob=next(chosen), top=top) for token_id in ids)
        for ids, top in zip(token_ids, tops, strict=True)
    ]


def _tops(logits: torch.Tensor, logprobs: torch.Tensor, num_top: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    width = min(max(num_top, default=0), logits.shape[-1])
    if width == 0:
        return [()] * len(num_top)
    # By logits: two that differ may round to the same log probability.
    _, ids = best(logits, width)
    pairs = zip(ids.tolist(), logprobs.gather(-1, ids).tolist(), num_top, strict=True)
    return [tuple(zip(row_ids[:count], values[:count], strict=True)) for row_ids, values, count in pairs]
