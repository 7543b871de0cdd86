"""The highest of some logits in an order that leaves nothing open: of equal ones, the lower id goes first.

Logits of bfloat16 models are often equal, and which of the equal ones a plain `topk` returns depends on how many are
asked for, hence on batch mates.
"""

import torch

_FEW = 64
_SPARE = 32


def best(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the highest logits and their ids, best first; of equal ones the lower id, as argmax has it.

    Args:
        logits: (R, V), float32, no NaN.
        width: How many, in [1, V].

    Returns:
        Values (R, width), float32, and ids (R, width), int64.
    """
    vocab = logits.shape[-1]
    if width <= _FEW:
        values, ids = logits.topk(min(vocab, width + _SPARE), dim=-1)
        if values.shape[-1] == vocab or bool((values[:, -1] < values[:, width - 1]).all()):
            # All that equal the last one wanted are among these.
            return _in_order(logits, ids, width)
    ids = _LOW_BITS - (_keys(logits).topk(width, dim=-1).values & _LOW_BITS)
    return logits.gather(-1, ids), ids


_LOW_BITS = 2**32 - 1


def _keys(logits: torch.Tensor) -> torch.Tensor:
    """Make integers (R, V) that are all different in a row and that sort as the logits, then as the ids backwards."""
    # Adding 0 turns -0.0 into 0.0; the bits of negative floats sort the other way round.
    bits = (logits + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return (ordered.long() << 32) | (_LOW_BITS - ids)


def _in_order(logits: torch.Tensor, ids: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = ids.sort(dim=-1).values
    values, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values[:, :width], ids.gather(-1, order)[:, :width]
