"""Attention over gathered keys and values: which of torch's ways to compute it, in one place.

softcap                 matrix products; no fused kernel of torch has it
bfloat16 on a CPU       matrix products, one softmax between them: the fused kernel of torch 2.13 is no faster in
                        bfloat16 than in float32 and takes two to three times as long (docs/performance.md)
everything else         `scaled_dot_product_attention`
"""

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows

from engine.attention.function import Score

FUSED_TILE = 256
"""Queries per tile of a prompt's chunk for the fused kernel: the mask of a tile stays small at any context length."""
PRODUCT_TILE = 256
"""The same for matrix products: fewer would make them too small, more would push their scores out of the cache."""
LONGEST_TILE = max(FUSED_TILE, PRODUCT_TILE)


def is_by_products(query: torch.Tensor, score: Score) -> bool:
    """Whether two matrix products with a softmax between them are the way for these queries."""
    return score.softcap is not None or (query.device.type == "cpu" and query.dtype == torch.bfloat16)


def tile_of(query: torch.Tensor, score: Score) -> int:
    """Return how many queries of a prompt's chunk should attend together."""
    return PRODUCT_TILE if is_by_products(query, score) else FUSED_TILE


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, score: Score) -> torch.Tensor:
    """Attend over all keys.

    Args:
        q: (B, H, T, D); H is a multiple of H_kv.
        k: (B, H_kv, L, D), dtype of `q`.
        v: (B, H_kv, L, D_v), dtype of `q`.
        mask: Added to the scores of the last keys, broadcastable to (B, 1, T, M); the fused kernel wants M = L.
        score: How scores are made.

    Returns:
        (B, H, T, D_v).
    """
    if is_by_products(q, score):
        return _by_products(q, k, v, mask, score)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=score.scale, enable_gqa=grouped)


def _by_products(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, score: Score) -> torch.Tensor:
    batch, heads, length, dim = q.shape
    kv_heads = k.shape[1]
    scale = dim**-0.5 if score.scale is None else score.scale
    # The query heads of a KV head become rows of one matrix, so that a KV head is read once.
    folded = (q * scale).reshape(batch, kv_heads, -1, dim)
    if batch > 1 or mask.dim() > 2:
        shape = (batch, heads, length)
        return _attend_folded(folded, k, v, mask, score, shape).view(*shape, -1)
    # A long prompt's product with one KV head takes half the time of its share in a product with all of them.
    out = q.new_empty((kv_heads, folded.shape[2], v.shape[-1]))
    for head in range(kv_heads):
        shape = (1, heads // kv_heads, length)
        out[head] = _attend_folded(folded[0, head], k[0, head], v[0, head], mask, score, shape)
    return out.view(batch, heads, length, -1)


def _attend_folded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, score: Score, shape: tuple[int, int, int]
) -> torch.Tensor:
    """Attend with (..., R, D) to (..., L, D), R being heads times queries of `shape`; gives (..., R, D_v)."""
    scores = torch.matmul(q, k.transpose(-1, -2))
    if score.softcap is not None:
        scores.div_(score.softcap).tanh_().mul_(score.softcap)
    num_keys = scores.shape[-1]
    scores.view(*shape, num_keys)[..., num_keys - mask.shape[-1] :].add_(mask)
    return torch.matmul(scores.softmax(-1), v)
