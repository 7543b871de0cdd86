"""Decoder layers in fewer and faster steps: packed weights, one product for q, k and v, one for gate and up.

The rewrite goes by the shape of a layer (its submodules' names), not by its class, and a layer is only changed when
its new forward gives what its old one gives on random input: same queries, keys, values, scores, output. Any other
layer stays as it is, with its linear layers packed. The load probe checks the whole model afterwards.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.attention.function import STEP_ARGUMENT, AttentionStep, Score
from engine.packed_linear import LinearSlice, PackedLinear, can_pack, pack_linears
from engine.weights import LoadedModel

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}
"""Root mean square of the differences over that of the values."""
_PROBE_TOKENS = 5
_SERIAL_ELEMENTS = 32 * 1024
"""Torch computes elementwise operations on so many elements in the calling thread. Waking others for each of the seven
that a norm is made of takes longer than a norm of a few hundred tokens, so those are computed in such parts."""
_MOST_SERIAL_PARTS = 8

Norm = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedReport:
    """What has been changed."""

    fused_layers: int
    packed_linears: int
    """Linear layers outside fused layers that were packed."""


def fuse_layers(loaded: LoadedModel) -> FusedReport:
    """Change a model in place for speed, where this machine has the means; to be called once, before the probe."""
    if not can_pack(loaded.dtype, loaded.device):
        return FusedReport(fused_layers=0, packed_linears=0)
    base = loaded.model.base_model
    layers, rotary = getattr(base, "layers", ()), getattr(base, "rotary_emb", None)
    num_fused = 0
    if isinstance(rotary, nn.Module):
        with torch.no_grad():
            num_fused = sum(_fuse(layer, rotary, loaded) for layer in layers)
    return FusedReport(fused_layers=num_fused, packed_linears=pack_linears(loaded.model))


def packed_head_bytes(config: Any, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes that `fuse_layers` adds to a model: a head that is tied to the embedding is then in memory twice.

    Args:
        config: The text model's.
        dtype: Of the weights.
        device: Where they are.
    """
    if not config.tie_word_embeddings or not can_pack(dtype, device):
        return 0
    return int(config.vocab_size) * int(config.hidden_size) * dtype.itemsize


class FusedAttention:
    """Attention over the arena with one product for queries, keys and values."""

    def __init__(self, attention: Any) -> None:
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.parts = parts
        self.layer = int(attention.layer_idx)
        self.score = Score(None, None, None)
        """Set once what the model's own code asks for is known."""
        self.qkv = PackedLinear.of(parts)
        self.out = PackedLinear.of([attention.o_proj])
        self._head_dim = int(attention.head_dim)
        self._num_heads, self._num_kv_heads = (part.out_features // self._head_dim for part in parts[:2])
        self._q_norm = _fused_norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self._k_norm = _fused_norm(attention.k_norm) if hasattr(attention, "k_norm") else None

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], step: AttentionStep
    ) -> torch.Tensor:
        """Give residual + attention(x), both (1, T, hidden)."""
        heads = self.qkv(x).view(x.shape[1], -1, self._head_dim)
        turned = self._num_heads + self._num_kv_heads
        q_k, v = heads[:, :turned], heads[:, turned:]
        if self._q_norm is not None and self._k_norm is not None:
            q, k = q_k[:, : self._num_heads], q_k[:, self._num_heads :]
            q_k = torch.cat((self._q_norm(q), self._k_norm(k)), dim=1)
        q_k = _rotate(q_k, rotation)
        q, k = q_k[:, : self._num_heads], q_k[:, self._num_heads :]
        out = step.attend(self.layer, q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), self.score)
        return self.out.add(out.reshape(1, x.shape[1], -1), residual)


class FusedMlp:
    """A gated MLP with one product for gate and up."""

    def __init__(self, mlp: Any) -> None:
        self.parts = [mlp.gate_proj, mlp.up_proj]
        self.gate_up = PackedLinear.of(self.parts)
        self.down = PackedLinear.of([mlp.down_proj])
        self._activation: Callable[[torch.Tensor], torch.Tensor] = mlp.act_fn

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Give residual + mlp(x), both (1, T, hidden)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down.add(self._activation(gate).mul_(up), residual)


class FusedLayer:
    """Takes the place of a decoder layer's `forward`; whatever is not a step over the arena goes to the old one."""

    def __init__(self, layer: Any) -> None:
        self._original = layer.forward
        self._input_norm = _fused_norm(layer.input_layernorm)
        self._middle_norm = _fused_norm(layer.post_attention_layernorm)
        self.attention = FusedAttention(layer.self_attn)
        self.mlp = FusedMlp(layer.mlp)

    def __call__(self, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        """Compute the layer; hidden states (1, T, hidden)."""
        step: AttentionStep | None = options.get(STEP_ARGUMENT)
        rotation = options.get("position_embeddings")
        if step is None or rotation is None or arguments or options.get("attention_mask") is not None:
            return self._original(hidden_states, *arguments, **options)
        middle = self.attention.add(self._input_norm(hidden_states), hidden_states, rotation, step)
        return self.mlp.add(self._middle_norm(middle), middle)


class _Recorder:
    """An attention step that remembers what it is asked for; its output depends on the values."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.layer = -1
        self.score = Score(None, None, None)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score: Score
    ) -> torch.Tensor:
        self.layer, self.score = layer, score
        self.seen = [part.clone() for part in (query, key, value)]
        return value.repeat_interleave(query.shape[0] // value.shape[0], dim=0).transpose(0, 1).contiguous()


def _fuse(layer: Any, rotary: nn.Module, loaded: LoadedModel) -> bool:
    """Change a layer if it has the known shape and comes out the same; says whether it was changed."""
    if not _has_known_shape(layer):
        return False
    fused = FusedLayer(layer)
    if not _agrees(layer, fused, rotary, loaded):
        return False
    _share(layer.self_attn, ("q_proj", "k_proj", "v_proj"), fused.attention.qkv)
    _share(layer.mlp, ("gate_proj", "up_proj"), fused.mlp.gate_up)
    layer.self_attn.o_proj, layer.mlp.down_proj = fused.attention.out, fused.mlp.down
    layer.forward = fused
    return True


def _share(parent: nn.Module, names: tuple[str, ...], packed: PackedLinear) -> None:
    """Replace linear layers by slices of their packed product, so that their weights are in memory once."""
    first = 0
    for name in names:
        end = first + getattr(parent, name).out_features
        setattr(parent, name, LinearSlice(packed, first, end))
        first = end


def _has_known_shape(layer: Any) -> bool:
    """Whether the layer's submodules are those of Llama's layers, by name; norms of queries and keys may be there."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if attention is None or mlp is None:
        return False
    linears = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    linears += [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    children = {name for name, _ in layer.named_children()}
    return (
        children == {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
        and {name for name, _ in mlp.named_children()} == {"gate_proj", "up_proj", "down_proj", "act_fn"}
        and all(type(linear) is nn.Linear for linear in linears)
        and hasattr(attention, "head_dim")
        and hasattr(attention, "layer_idx")
    )


def _agrees(layer: Any, fused: FusedLayer, rotary: nn.Module, loaded: LoadedModel) -> bool:
    """Compare the two forwards on random input; the fused one takes its scores' making from the other."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, _PROBE_TOKENS, int(loaded.config.hidden_size), generator=generator).to(loaded.dtype)
    positions = torch.arange(_PROBE_TOKENS)[None] + 3
    expected, ours = _Recorder(), _Recorder()
    try:
        options = {"position_embeddings": rotary(hidden, position_ids=positions), "use_cache": False}
        wanted = layer(hidden, position_ids=positions, attention_mask=None, **options, **{STEP_ARGUMENT: expected})
        fused.attention.score = expected.score
        given = fused(hidden, **options, **{STEP_ARGUMENT: ours})
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError):
        # Another signature than Llama's layers have: the old forward stays.
        return False
    pairs = zip((wanted, *expected.seen), (given, *ours.seen), strict=True)
    return ours.layer == expected.layer and all(_is_close(a, b, loaded.dtype) for a, b in pairs)


def _is_close(wanted: Any, given: torch.Tensor, dtype: torch.dtype) -> bool:
    if not isinstance(wanted, torch.Tensor) or wanted.shape != given.shape:
        return False
    difference = (given.float() - wanted.float()).square().mean().sqrt()
    return bool(difference <= _TOLERANCE[dtype] * wanted.float().square().mean().sqrt())


def _rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn the two halves of each head, (T, heads, D), by angles (1, T, D) given as cosines and sines."""
    cos, sin = (part[0].unsqueeze(1) for part in rotation)
    half = x.shape[-1] // 2
    turned = x * cos
    turned[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    turned[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return turned


def _fused_norm(norm: Any) -> Norm:
    """Give a norm as one operation if it is a plain root mean square norm, else the norm itself."""
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", None)
    if not isinstance(weight, torch.Tensor) or not isinstance(eps, float) or not isinstance(norm, nn.Module):
        given: Norm = norm
        return given

    width = weight.numel()
    rows = max(1, _SERIAL_ELEMENTS // width)

    def whole(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, weight.shape, weight, eps)

    def fused(x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu" or not 1 < x.numel() / _SERIAL_ELEMENTS <= _MOST_SERIAL_PARTS:
            return whole(x)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        given, done = x.reshape(-1, width), out.view(-1, width)
        for start in range(0, len(given), rows):
            done[start : start + rows] = whole(given[start : start + rows])
        return out

    x = torch.randn(_PROBE_TOKENS, *weight.shape, generator=torch.Generator().manual_seed(1)).to(weight.dtype)
    module: Norm = norm
    return fused if _is_close(module(x), fused(x), weight.dtype) else module
