"""Attention over the arena in plain torch: write the new rows, gather the context, scaled dot products.

Decodes attend together, the query heads of a KV head folded into the query length: a KV head is then read once, and
bfloat16 on a CPU is several times faster. A prompt's chunk attends alone, in tiles of queries under one mask.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.attention.dense import LONGEST_TILE, attend, is_by_products, tile_of
from engine.attention.function import Score
from engine.attention.plan import DecodePlan, Gather, GroupPlan, GroupShape, PrefillPlan, RowGeometry, plan_group
from engine.batch import Batch
from kv_store.layout import Arena
from messages.errors import ModelRefused

StatisticsHook = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Called per layer with its number, queries (H, T, D), new keys (H_kv, T, D) and output (T, H, D_v); must not change
them."""


class CausalMasks:
    """Masks of one window, all of them the bottom right corner of one matrix that grows with the longest context."""

    def __init__(self, window: int | None, dtype: torch.dtype, device: torch.device) -> None:
        self.window = window
        self._dtype = dtype
        self._device = device
        self._matrix = self._make(LONGEST_TILE)

    def corner(self, num_queries: int, num_keys: int) -> torch.Tensor:
        """Return what is added to the scores when the last query stands at the last key, (queries, keys)."""
        if num_keys > self._matrix.shape[1]:
            self._matrix = self._make(2 * num_keys)
        return self._matrix[LONGEST_TILE - num_queries :, self._matrix.shape[1] - num_keys :]

    def _make(self, num_keys: int) -> torch.Tensor:
        queries = torch.arange(num_keys - LONGEST_TILE, num_keys, device=self._device)[:, None]
        distance = queries - torch.arange(num_keys, device=self._device)[None, :]
        hidden = distance < 0
        if self.window is not None:
            hidden |= distance >= self.window
        return torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, float("-inf"))


class Scratch:
    """One buffer that every layer gathers into, so that what was just gathered is still in the processor's cache."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def take_rows(self, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Copy rows of a matrix, (len(index), unit); valid until the next call."""
        size = index.numel() * rows.shape[1]
        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = rows.new_empty(size + size // 4)
        out = self._buffer[:size].view(-1, rows.shape[1])
        return torch.index_select(rows, 0, index, out=out)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One layer's part of the arena."""

    group: int
    keys: torch.Tensor
    values: torch.Tensor
    key_rows: torch.Tensor
    value_rows: torch.Tensor
    key_scratch: Scratch
    value_scratch: Scratch
    """Shared by the layers of a group."""


class ArenaAttention:
    """Attention of one model over one arena; makes a step per forward pass."""

    def __init__(self, arena: Arena, dtype: torch.dtype, statistics: StatisticsHook | None = None) -> None:
        self.num_calls = 0
        """Layers that have attended since the beginning, summed over all steps."""
        self._statistics = statistics
        self._shapes: list[GroupShape] = []
        self._masks: list[CausalMasks] = []
        self._layers: dict[int, _Layer] = {}
        for number, group in enumerate(arena.layout.groups):
            keys, values = (RowGeometry.of(view) for view in arena.layer_views(group.layers[0]))
            shape = GroupShape(
                number=number,
                window=group.window,
                block_size=arena.layout.block_size,
                keys=keys,
                values=values,
                dtype=dtype,
                device=arena.buffer.device,
            )
            self._shapes.append(shape)
            self._masks.append(CausalMasks(group.window, dtype, arena.buffer.device))
            scratch = (Scratch(), Scratch())
            for layer in group.layers:
                k, v = arena.layer_views(layer)
                self._layers[layer] = _Layer(
                    group=number,
                    keys=k,
                    values=v,
                    key_rows=keys.rows(k),
                    value_rows=values.rows(v),
                    key_scratch=scratch[0],
                    value_scratch=scratch[1],
                )

    def begin(self, batch: Batch) -> "TorchStep":
        """Plan one forward pass over a batch with at least one row."""
        return TorchStep(self, [plan_group(batch, shape) for shape in self._shapes])

    def attend(
        self,
        plans: list[GroupPlan],
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        score: Score,
    ) -> torch.Tensor:
        """See `AttentionStep.attend`."""
        place = self._place(layer, key, value, score)
        plan, masks = plans[place.group], self._masks[place.group]
        place.keys[plan.blocks, :, plan.offsets] = key.transpose(0, 1).to(place.keys.dtype)
        place.values[plan.blocks, :, plan.offsets] = value.transpose(0, 1).to(place.values.dtype)
        if plan.is_one_decode:
            out = _decode(plan.decodes[0], place, query, score)
        else:
            out = query.new_empty((query.shape[1], query.shape[0], value.shape[-1]))
            for decode in plan.decodes:
                out[decode.tokens] = _decode(decode, place, query.index_select(1, decode.tokens), score)
            for prefill in plan.prefills:
                _prefill(prefill, place, masks, query, score, out)
        self.num_calls += 1
        if self._statistics is not None:
            self._statistics(layer, query, key, out)
        return out

    def _place(self, layer: int, key: torch.Tensor, value: torch.Tensor, score: Score) -> _Layer:
        place = self._layers.get(layer)
        if place is None:
            raise ModelRefused(f"attention of layer {layer}, which the KV layout does not have")
        heads, k_dim, v_dim = place.keys.shape[1], place.keys.shape[3], place.values.shape[3]
        if (key.shape[0], key.shape[2], value.shape[2]) != (heads, k_dim, v_dim):
            raise ModelRefused(f"layer {layer} has KV of another shape than its configuration says")
        window = self._shapes[place.group].window
        if score.window is not None and score.window != window:
            raise ModelRefused(f"layer {layer} asks for a window of {score.window}, its KV group has {window}")
        return place


class TorchStep:
    """One forward pass: the plans of its batch bound to the arena."""

    __slots__ = ("_attention", "_plans")

    def __init__(self, attention: ArenaAttention, plans: list[GroupPlan]) -> None:
        self._attention = attention
        self._plans = plans

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score: Score
    ) -> torch.Tensor:
        """See `AttentionStep.attend`."""
        return self._attention.attend(self._plans, layer, query, key, value, score)


def _gather(gather: Gather, place: _Layer, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy whole blocks out of the arena: k (B, H_kv, M * S, D) and v (B, H_kv, M * S, D_v), until the next gather."""
    shape = (gather.num_sequences, place.keys.shape[1], -1)
    k = place.key_scratch.take_rows(place.key_rows, gather.key_index).view(*shape, place.keys.shape[3])
    v = place.value_scratch.take_rows(place.value_rows, gather.value_index).view(*shape, place.values.shape[3])
    return k.to(dtype), v.to(dtype)


def _decode(plan: DecodePlan, place: _Layer, query: torch.Tensor, score: Score) -> torch.Tensor:
    """Attend with the plan's tokens alone: query (H, B, D), returns (B, H, D_v)."""
    k, v = _gather(plan.gather, place, query.dtype)
    num_heads, batch, dim = query.shape
    folded = query.reshape(k.shape[1], -1, batch, dim).permute(2, 0, 1, 3)
    return attend(folded, k, v, plan.mask, score).reshape(batch, num_heads, -1)


def _prefill(
    plan: PrefillPlan, place: _Layer, masks: CausalMasks, query: torch.Tensor, score: Score, out: torch.Tensor
) -> None:
    k, v = _gather(plan.gather, place, query.dtype)
    window, tile = masks.window, tile_of(query, score)
    for start in range(plan.start, plan.end, tile):
        end = min(start + tile, plan.end)
        first = plan.first_token + start - plan.start
        first_key = 0 if window is None else max(0, start - window + 1)
        keys = slice(first_key - plan.first_key, end - plan.first_key)
        # Without a window every query of the tile sees all keys before the tile.
        num_masked = end - (start if window is None and is_by_products(query, score) else first_key)
        mask = masks.corner(end - start, num_masked)
        attended = attend(query[None, :, first : first + end - start], k[:, :, keys], v[:, :, keys], mask, score)
        out[first : first + end - start] = attended[0].transpose(0, 1)
