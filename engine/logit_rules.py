"""What a request asks of its logits before a token is chosen: biases, penalties, and which tokens may come at all.

Each rule works on all rows that have it at once. Masks are the last to be applied, which changes nothing: what a bias
or a penalty does to a token that may not come is never seen.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np
import torch

from engine.batch import Row
from messages.requests import SamplingParams


def sampling_of(row: Row) -> SamplingParams:
    """Return the parameters of a row that samples."""
    assert row.sampling is not None
    return row.sampling


def has_rules(row: Row) -> bool:
    """Whether `apply_rules` may change the row's logits."""
    params = sampling_of(row)
    return _is_masked(row) or bool(params.logit_bias) or _is_repetition_penalised(row) or _is_count_penalised(row)


def apply_rules(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    """Change logits as the rows' sampling parameters and grammars say.

    Biases are added first, then the repetition penalty scales, then the frequency and presence penalties are taken off;
    tokens that may not come become -inf. Ids outside the vocabulary are passed over: they cannot come anyway.

    When the rules of a row together allow no token, the weakest give way, one by one, so that one can always be chosen:
    first `min_tokens`, then `bad_words`, then `allowed_token_ids`. The grammar has the last word: the token is one
    that it allows, unless it allows none at all.

    Args:
        logits: (R, V), float32; changed in place.
        rows: R rows that sample.
    """
    _add_biases(logits, rows)
    _penalise_repetition(logits, rows)
    _penalise_generated(logits, rows)
    _mask(logits, rows)


def _select(rows: Sequence[Row], has: Callable[[Row], bool]) -> list[int]:
    return [number for number, row in enumerate(rows) if has(row)]


def _entries(numbers: Sequence[int], lists: Sequence[Sequence[int]], vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Return row numbers and token ids of all list entries inside the vocabulary, and which entries these are."""
    lengths = [len(ids) for ids in lists]
    ids = np.fromiter(chain.from_iterable(lists), dtype=np.int64, count=sum(lengths))
    places = np.stack([np.repeat(np.array(numbers, dtype=np.int64), lengths), ids])
    is_known = (ids >= 0) & (ids < vocab)
    return places[:, is_known], is_known


def _add_biases(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    numbers = _select(rows, lambda row: bool(sampling_of(row).logit_bias))
    if not numbers:
        return
    biases = [sampling_of(rows[number]).logit_bias for number in numbers]
    places, is_known = _entries(numbers, [[token_id for token_id, _ in bias] for bias in biases], logits.shape[-1])
    amounts = np.array([amount for bias in biases for _, amount in bias], dtype=np.float32)[is_known]
    row_index, ids = torch.from_numpy(places).to(logits.device)
    logits.index_put_((row_index, ids), torch.from_numpy(amounts).to(logits.device), accumulate=True)


def _is_repetition_penalised(row: Row) -> bool:
    return sampling_of(row).repetition_penalty != 1.0


def _penalise_repetition(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    numbers = _select(rows, _is_repetition_penalised)
    if not numbers:
        return
    # The prompt of a row and its output are two lists of the same row.
    known = [tokens for number in numbers for tokens in (rows[number].prompt, rows[number].generated)]
    places, _ = _entries([number for number in numbers for _ in range(2)], known, logits.shape[-1])
    penalty_of = np.array([sampling_of(row).repetition_penalty for row in rows], dtype=np.float32)
    penalties = torch.from_numpy(penalty_of[places[0]]).to(logits.device)
    row_index, ids = torch.from_numpy(places).to(logits.device)
    values = logits[row_index, ids]
    # A token that is there twice is written twice, with the same value.
    logits[row_index, ids] = torch.where(values > 0, values / penalties, values * penalties)


def _is_count_penalised(row: Row) -> bool:
    params = sampling_of(row)
    return bool(row.generated) and (params.frequency_penalty != 0.0 or params.presence_penalty != 0.0)


def _penalise_generated(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    numbers = _select(rows, _is_count_penalised)
    if not numbers:
        return
    vocab = logits.shape[-1]
    places, _ = _entries(numbers, [rows[number].generated for number in numbers], vocab)
    flat, counts = np.unique(places[0] * vocab + places[1], return_counts=True)
    frequency = np.array([sampling_of(row).frequency_penalty for row in rows])
    presence = np.array([sampling_of(row).presence_penalty for row in rows])
    amounts = (frequency[flat // vocab] * counts + presence[flat // vocab]).astype(np.float32)
    index = torch.from_numpy(flat).to(logits.device)
    logits.view(-1)[index] -= torch.from_numpy(amounts).to(logits.device)


def _is_masked(row: Row) -> bool:
    params = sampling_of(row)
    return (
        row.matcher is not None or params.allowed_token_ids is not None or bool(params.bad_words) or _is_too_short(row)
    )


def _is_too_short(row: Row) -> bool:
    return len(row.generated) < sampling_of(row).min_tokens


def _mask(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    numbers = _select(rows, _is_masked)
    if not numbers:
        return
    masked = [rows[number] for number in numbers]
    allowed = torch.ones(len(masked), logits.shape[-1], dtype=torch.bool, device=logits.device)
    for rule in _masks(masked, allowed):
        narrowed = allowed & rule
        allowed = torch.where(narrowed.any(dim=-1, keepdim=True), narrowed, allowed)
    # An allowed token that the model itself gives -inf is still better than one that is not allowed.
    scores = logits[numbers].clamp_(min=torch.finfo(logits.dtype).min)
    logits[numbers] = scores.masked_fill_(~allowed, float("-inf"))


def _masks(rows: Sequence[Row], like: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield which tokens each kind of rule allows, (R, V) like `like`; the strongest rule first."""
    if any(row.matcher is not None for row in rows):
        yield _grammar_mask(rows, like)
    if any(sampling_of(row).allowed_token_ids is not None for row in rows):
        yield _list_mask(rows, like)
    banned_words = [_completions(row) for row in rows]
    if any(banned_words):
        yield _ban(banned_words, like)
    ends = [_ends(row) if _is_too_short(row) else () for row in rows]
    if any(ends):
        yield _ban(ends, like)


def _grammar_mask(rows: Sequence[Row], like: torch.Tensor) -> torch.Tensor:
    # Grammars write on the CPU; the device gets all rows in one copy.
    mask = torch.ones(like.shape, dtype=torch.bool)
    for number, row in enumerate(rows):
        if row.matcher is not None:
            row.matcher.fill_mask(mask[number])
    return mask.to(like.device)


def _list_mask(rows: Sequence[Row], like: torch.Tensor) -> torch.Tensor:
    numbers = _select(rows, lambda row: sampling_of(row).allowed_token_ids is not None)
    mask = torch.ones_like(like)
    mask[numbers] = False
    lists = [sampling_of(rows[number]).allowed_token_ids or () for number in numbers]
    places, _ = _entries(numbers, lists, like.shape[-1])
    row_index, ids = torch.from_numpy(places).to(like.device)
    mask[row_index, ids] = True
    return mask


def _ban(lists: Sequence[Sequence[int]], like: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(like)
    places, _ = _entries(range(len(lists)), lists, like.shape[-1])
    row_index, ids = torch.from_numpy(places).to(like.device)
    mask[row_index, ids] = False
    return mask


def _ends(row: Row) -> tuple[int, ...]:
    params = sampling_of(row)
    return params.end_token_ids + params.stop_token_ids


def _completions(row: Row) -> tuple[int, ...]:
    """Return the tokens that would complete a bad word now; what comes before may lie in prompt or output."""
    words = [word for word in sampling_of(row).bad_words if word]
    longest = max((len(word) - 1 for word in words), default=0)
    tail = _last(row, longest)
    # Not tail[-0:], which would be all of it.
    return tuple(word[-1] for word in words if tail[len(tail) - min(len(tail), len(word) - 1) :] == word[:-1])


def _last(row: Row, count: int) -> tuple[int, ...]:
    generated = tuple(row.generated[max(0, len(row.generated) - count) :])
    missing = count - len(generated)
    return tuple(row.prompt[max(0, len(row.prompt) - missing) :]) + generated if missing else generated
