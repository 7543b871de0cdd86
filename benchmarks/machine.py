"""What this machine can do at best, and how long a model's step must therefore take: the floors of every claim."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_READ_BYTES = 1 << 29
_GEMM = (2048, 576, 1536)
"""(rows, inner, columns): the shape of a prompt's products in the demo model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Limits, measured with the threads that torch has now."""

    read_gb_s: float
    """Reading one large tensor."""
    gemm_gflop_s: float
    """One large product in the model's dtype."""

    def or_better(self, other: "Machine") -> "Machine":
        """Of each limit the higher one: on a machine that others use too, a limit is what it once gave."""
        return Machine(
            read_gb_s=max(self.read_gb_s, other.read_gb_s), gemm_gflop_s=max(self.gemm_gflop_s, other.gemm_gflop_s)
        )

    @classmethod
    def measure(cls, dtype: torch.dtype, repeats: int = 7) -> "Machine":
        """Measure for a second or two; the best of the repeats, since a limit is what nothing exceeds."""
        data = torch.ones(_READ_BYTES // 4)
        rows, inner, columns = _GEMM
        a, b = torch.randn(rows, inner, dtype=dtype), torch.randn(columns, inner, dtype=dtype)
        with torch.inference_mode():
            read_s = _best_s(data.sum, repeats)
            gemm_s = _best_s(lambda: torch.nn.functional.linear(a, b), repeats)
        return cls(read_gb_s=_READ_BYTES / read_s / 1e9, gemm_gflop_s=2 * rows * inner * columns / gemm_s / 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What one step of a dense decoder must compute and read."""

    weights: int
    """Parameters in products of every token, without the head."""
    head: int
    """Parameters of the head, which only sampled positions need."""
    layers: int
    width: int
    """Query heads times head dim."""
    kv_width: int
    """KV heads times head dim."""
    item_bytes: int

    @classmethod
    def of(cls, model: Any, dtype: torch.dtype) -> "ModelSize":
        """Read a configuration of Llama's kind."""
        config = model.config
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width, kv_width = dim * config.num_attention_heads, dim * config.num_key_value_heads
        per_layer = config.hidden_size * (2 * width + 2 * kv_width + 3 * config.intermediate_size)
        return cls(
            weights=per_layer * config.num_hidden_layers,
            head=config.vocab_size * config.hidden_size,
            layers=config.num_hidden_layers,
            width=width,
            kv_width=kv_width,
            item_bytes=dtype.itemsize,
        )

    def prefill_floor_s(self, num_tokens: int, machine: Machine) -> float:
        """Products and causal attention of a whole prompt at the machine's rate of products."""
        attention = 2 * self.layers * self.width * num_tokens * num_tokens
        flops = 2 * self.weights * num_tokens + 2 * self.head + attention
        return flops / machine.gemm_gflop_s / 1e9

    def decode_floor_s(self, batch: int, context: int, machine: Machine) -> float:
        """The longer of reading weights and KV once, and of computing."""
        kv = 2 * self.layers * self.kv_width * context * batch
        read_s = (self.weights + self.head + kv) * self.item_bytes / machine.read_gb_s / 1e9
        flops = 2 * batch * (self.weights + self.head) + 4 * self.layers * self.width * context * batch
        return max(read_s, flops / machine.gemm_gflop_s / 1e9)


def _best_s(work: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        started_s = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started_s)
    return best
