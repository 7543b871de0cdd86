"""Logits become token ids; the draw of a token depends on its request, choice and position and on nothing else.

The random number comes from a counter-based generator keyed by (seed, choice, position). A request thus draws the same
numbers alone, in any batch, after a hand-off and in a replay.

Source: Philox, Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch

from engine.batch import Row, Sampled
from engine.logit_rules import apply_rules, has_rules, sampling_of
from engine.logprobs import token_logprobs
from engine.ranking import best
from messages.requests import SamplingParams

_CANDIDATES = (64, 1024, 8192)
"""How many tokens of highest logit are looked at for top-k and top-p; a row goes on while that is too few for it."""


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[tuple[Sampled, ...]]:
    """Choose one token per row and choice.

    Biases, penalties and masks work on the logits first (`apply_rules`, which says what happens when nothing is left),
    then temperature, top-k, top-p and min-p. Rows that are greedy and have no rules cost an argmax.

    Args:
        logits: (R, V) as the model gave them, any float dtype.
        rows: R rows that sample.

    Returns:
        Per row, one `Sampled` of one token per entry of its `choices`.
    """
    special = [number for number, row in enumerate(rows) if sampling_of(row).temperature > 0 or has_rules(row)]
    if not special:
        return _with_logprobs(logits, rows, _greedy(logits, rows))
    chosen = dict(zip(special, _choose(logits[special].float(), [rows[number] for number in special]), strict=True))
    plain = [number for number in range(len(rows)) if number not in chosen]
    if plain:
        chosen.update(zip(plain, _greedy(logits[plain], [rows[number] for number in plain]), strict=True))
    return _with_logprobs(logits, rows, [chosen[number] for number in range(len(rows))])


def uniform(row: Row, choice: int) -> float:
    """Return the random number in [0, 1) that belongs to the token which follows the row in a choice."""
    seed = sampling_of(row).seed
    if seed is None:
        seed = int.from_bytes(hashlib.sha256(row.request_id.encode()).digest()[:8], "little")
    key = np.array([seed & (2**64 - 1), choice], dtype=np.uint64)
    counter = np.array([row.end, 0, 0, 0], dtype=np.uint64)
    bits = int(np.random.Philox(key=key, counter=counter).random_raw())
    # 48 bits: times the total mass, it stays below the total after rounding.
    return (bits >> 16) / 2**48


def _greedy(logits: torch.Tensor, rows: Sequence[Row]) -> list[list[int]]:
    # The first of equal ones, like argmax, which is several times slower for bfloat16 on a CPU.
    tokens: list[int] = logits.max(dim=-1).indices.tolist()
    return [[token] * len(row.choices) for token, row in zip(tokens, rows, strict=True)]


def _choose(logits: torch.Tensor, rows: list[Row]) -> list[list[int]]:
    """Choose tokens by all rules; `logits` (R, V), float32, are used up."""
    apply_rules(logits, rows)
    drawn = [number for number, row in enumerate(rows) if sampling_of(row).temperature > 0]
    if len(drawn) == len(rows):
        return _draw(logits, rows)
    tokens = _greedy(logits, rows)
    if drawn:
        for number, drawn_tokens in zip(drawn, _draw(logits[drawn], [rows[number] for number in drawn]), strict=True):
            tokens[number] = drawn_tokens
    return tokens


def _with_logprobs(
    logits: torch.Tensor, rows: Sequence[Row], tokens: Sequence[Sequence[int]]
) -> list[tuple[Sampled, ...]]:
    samples = [tuple(Sampled(token_ids=(token,)) for token in choices) for choices in tokens]
    asked = {n: count for n, row in enumerate(rows) if (count := sampling_of(row).logprobs) is not None}
    if asked:
        numbers = list(asked)
        listed = token_logprobs(logits[numbers], [tokens[number] for number in numbers], list(asked.values()))
        for number, entries in zip(numbers, listed, strict=True):
            samples[number] = tuple(Sampled(token_ids=(entry.token_id,), logprobs=(entry,)) for entry in entries)
    return samples


def _draw(logits: torch.Tensor, rows: list[Row]) -> list[list[int]]:
    """Draw a token per row and choice; `logits` (R, V), float32, are used up."""
    mass = _weigh(logits, [sampling_of(row) for row in rows])
    # Rows with fewer choices than others repeat their last one.
    width = max(len(row.choices) for row in rows)
    numbers = [[uniform(row, choice) for choice in row.choices] for row in rows]
    padded = [found + found[-1:] * (width - len(found)) for found in numbers]
    points = torch.tensor(padded, dtype=torch.float64, device=logits.device)
    places = torch.searchsorted(mass, points * mass[:, -1:], right=True)
    # A row whose logits are NaN gets some token: an id that does not exist would take its batch mates down with it.
    tokens: list[list[int]] = places.clamp_(max=logits.shape[-1] - 1).tolist()
    return [found[: len(row.choices)] for found, row in zip(tokens, rows, strict=True)]


def _weigh(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Sum up probabilities after temperature and filters, (R, V), float64; `logits` are used up.

    In the order of the vocabulary, not of the logits: two that are nearly equal may change places between batches.
    """
    temperatures = torch.tensor([p.temperature for p in params], dtype=logits.dtype, device=logits.device)[:, None]
    # The largest becomes 0 first, so that no temperature is small enough to overflow.
    logits.sub_(logits.amax(dim=-1, keepdim=True)).div_(temperatures.clamp_(min=torch.finfo(torch.float32).tiny))
    filtered = [number for number, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0]
    if filtered:
        logits[filtered] = _keep_top(logits[filtered], [params[number] for number in filtered])
    if any(p.min_p > 0 for p in params):
        floors = [math.log(p.min_p) if p.min_p > 0 else float("-inf") for p in params]
        logits.masked_fill_(logits < torch.tensor(floors, device=logits.device)[:, None], float("-inf"))
    return logits.softmax(dim=-1).double().cumsum_(dim=-1)


def _keep_top(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Set all but the top-k, and of these all but the top-p, to -inf; the best token always stays."""
    vocab = logits.shape[-1]
    top_k = torch.tensor([p.top_k if 0 < p.top_k < vocab else vocab for p in params], device=logits.device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=logits.device)[:, None]
    out = torch.full_like(logits, float("-inf"))
    left = torch.arange(len(params), device=logits.device)
    for width in (*(width for width in _CANDIDATES if width < vocab), vocab):
        kept, too_few = _keep_among(logits[left], top_k[left], top_p[left], width)
        out[left] = kept
        left = left[too_few]
        if not len(left):
            break
    return out


def _keep_among(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Filter while looking at the `width` best tokens only; also say for which rows (R,) that was too few."""
    values, ids = best(logits, width)
    ranks = torch.arange(width, device=logits.device)
    in_k = ranks < top_k
    shares = logits.softmax(dim=-1).gather(-1, ids).double() * in_k
    # Summed one after another, so that the width changes no rounding.
    through = shares.cumsum(dim=-1)
    # Top-p is a part of what top-k keeps; a row that top-k does not limit has its total in all logits.
    is_limited = top_k < logits.shape[-1]
    total = torch.where(is_limited, through[:, -1:], 1.0)
    kept = in_k & ((through - shares < top_p * total) | (ranks == 0))
    out = torch.full_like(logits, float("-inf")).scatter_(-1, ids, values.masked_fill(~kept, float("-inf")))
    return out, ((top_k > width) & (is_limited | kept[:, -1:]))[:, 0]
