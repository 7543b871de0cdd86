"""Logits become token ids; the draw of a token depends on its request, choice and position and on nothing else.

The random number comes from a counter-based generator keyed by (seed, choice, position). A request thus draws the same
numbers alone, in any batch, after a hand-off and in a replay.

Source: Philox, Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from engine.batch import Row
from messages.requests import SamplingParams

_CANDIDATES = 1024
"""Tokens of highest logit that are sorted first; nearly always all that top-k and top-p can keep."""


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """Choose one token per row.

    Args:
        logits: (R, V), any float dtype.
        rows: R rows, each with sampling parameters.

    Returns:
        R token ids.
    """
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    drawn = [number for number, row in enumerate(rows) if _params(row).temperature > 0]
    if drawn:
        chosen = _draw(logits[drawn].float(), [rows[number] for number in drawn])
        for number, token in zip(drawn, chosen, strict=True):
            tokens[number] = token
    return tokens


def uniform(row: Row) -> float:
    """Return the random number in [0, 1) that belongs to the token which follows the row."""
    seed = _params(row).seed
    if seed is None:
        seed = int.from_bytes(hashlib.sha256(row.request_id.encode()).digest()[:8], "little")
    key = np.array([seed & (2**64 - 1), row.choice], dtype=np.uint64)
    counter = np.array([row.end, 0, 0, 0], dtype=np.uint64)
    bits = int(np.random.Philox(key=key, counter=counter).random_raw())
    # 48 bits: times the total mass, it stays below the total after rounding.
    return (bits >> 16) / 2**48


def _params(row: Row) -> SamplingParams:
    assert row.sampling is not None
    return row.sampling


def _draw(logits: torch.Tensor, rows: list[Row]) -> list[int]:
    params = [_params(row) for row in rows]
    temperatures = torch.tensor([p.temperature for p in params], device=logits.device)[:, None]
    # The largest becomes 0 first, so that no temperature is small enough to overflow.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures
    filtered = [number for number, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0]
    if filtered:
        logits[filtered] = _keep_top(logits[filtered], [params[number] for number in filtered])
    # In the order of the vocabulary, not of the logits: two that are nearly equal may change places between batches.
    mass = logits.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    points = torch.tensor([uniform(row) for row in rows], dtype=torch.float64, device=logits.device)[:, None]
    chosen: list[int] = torch.searchsorted(mass, points * mass[:, -1:], right=True)[:, 0].tolist()
    return chosen


def _keep_top(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Set all but the top-k, and of these all but the top-p, to -inf; the best token always stays."""
    vocab = logits.shape[-1]
    limits = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    width = min(vocab, max(_CANDIDATES, *(limit for limit in limits if limit < vocab), 0))
    top_k = torch.tensor(limits, device=logits.device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=logits.device)[:, None]
    kept = _keep_among(logits, top_k, top_p, width)
    return _keep_among(logits, top_k, top_p, vocab)[0] if kept[1] else kept[0]


def _keep_among(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, width: int
) -> tuple[torch.Tensor, bool]:
    """Filter while looking at the `width` best tokens only; also say whether that was too few for some row."""
    values, ids = _best(logits, width)
    ranks = torch.arange(width, device=logits.device)
    in_k = ranks < top_k
    # Shares of what top-k keeps; a row that it does not limit has its total in all logits.
    total = torch.where(top_k > width, logits.exp().sum(-1, keepdim=True), (values.exp() * in_k).sum(-1, keepdim=True))
    shares = (values.exp() * in_k).double() / total
    before = shares.cumsum(dim=-1) - shares
    kept = in_k & ((before < top_p) | (ranks == 0))
    too_few = bool((kept[:, -1:] & (top_k > width)).any())
    out = torch.full_like(logits, float("-inf")).scatter_(-1, ids, values.masked_fill(~kept, float("-inf")))
    return out, too_few


def _best(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `width` highest logits and their ids, best first; of equal ones the lower id, as argmax has it."""
    ids = logits.topk(width, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)
