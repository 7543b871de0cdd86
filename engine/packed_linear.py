"""Linear layers whose weights lie in the order in which oneDNN reads them.

A plain weight is reordered at every call, or read at half of the memory's speed; packed once, the same product takes
half of the time for few tokens (docs/performance.md). The packed weight replaces the plain one; only a head that is
tied to the embedding is in memory twice.
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import nn


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this machine has packed products for such weights."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call] # torch's
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001 - torch has no other name for it


class PackedLinear(nn.Module):
    """One product for one or several linear layers over the same input, their outputs side by side."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # Tensors made in inference mode cannot be packed.
        with torch.inference_mode(mode=False):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().clone().contiguous(), None)  # noqa: SLF001 - the op has no public name
        self.bias = bias

    @classmethod
    def of(cls, linears: Sequence[nn.Linear]) -> Self:
        """Pack layers; the product's columns are theirs, in order."""
        biases: list[torch.Tensor | None] = [linear.bias for linear in linears]
        bias = None
        if any(found is not None for found in biases):
            zeros = (linear.weight.new_zeros(linear.out_features) for linear in linears)
            bias = torch.cat([zero if found is None else found for found, zero in zip(biases, zeros, strict=True)])
        return cls(torch.cat([linear.weight for linear in linears]), bias)

    @property
    def weight(self) -> torch.Tensor:
        """The plain weight (out, in), made anew at every call."""
        dense: torch.Tensor = self._packed.to_dense()
        return dense

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give x @ weight.T + bias, (..., out)."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")  # noqa: SLF001
        return out

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Give residual + x @ weight.T + bias, (..., out), in one pass."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self.bias, "add")  # noqa: SLF001
        return out


class LinearSlice(nn.Module):
    """A linear layer that has become a part of a packed one: some of its output columns.

    Slow: it unpacks the weight. It serves the model's own forward, which only the load probe calls.
    """

    def __init__(self, packed: PackedLinear, first: int, end: int) -> None:
        super().__init__()
        self._packed = packed
        self._columns = slice(first, end)

    @property
    def weight(self) -> torch.Tensor:
        """The plain weight (out, in), made anew at every call."""
        return self._packed.weight[self._columns]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give the columns' part of the product."""
        bias = self._packed.bias
        return nn.functional.linear(x, self.weight, None if bias is None else bias[self._columns])


def pack_linears(module: nn.Module) -> int:
    """Replace every plain linear layer inside a module by a packed one; returns how many."""
    found = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    for parent, name, child in found:
        setattr(parent, name, PackedLinear.of([child]))
    return len(found)
