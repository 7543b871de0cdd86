"""Tiny models with random weights, and a driver that plays scheduler and allocator for them."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import transformers

from engine.attention.function import ATTENTION_NAME
from engine.batch import Batch, Row
from engine.model_runner import ModelRunner
from engine.weights import LoadedModel, kv_layout
from kv_store.layout import Arena
from messages.handoff import BlockId
from messages.requests import RequestId, SamplingParams

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_config(kind: str) -> Any:
    windowed = {**SIZES, "head_dim": 16, "sliding_window": 9}
    makers: dict[str, Callable[[], Any]] = {
        "llama": lambda: transformers.LlamaConfig(**SIZES),
        "llama-mqa": lambda: transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 1, "head_dim": 24}),
        "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=9),
        "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
        "gemma2": lambda: transformers.Gemma2Config(**windowed, query_pre_attn_scalar=16),
        "gemma3": lambda: transformers.Gemma3TextConfig(
            **windowed, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
        ),
        "bloom": lambda: transformers.BloomConfig(vocab_size=97, hidden_size=64, n_layer=3, n_head=4),
    }
    return makers[kind]()


@cache
def make_model(kind: str = "llama", dtype: torch.dtype = torch.float32) -> LoadedModel:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        make_config(kind), dtype=dtype, attn_implementation=ATTENTION_NAME
    )
    # At the usual small initial weights attention hardly moves the logits, and a fault in it would go unseen.
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return LoadedModel(
        model=model.eval().requires_grad_(requires_grad=False),
        config=model.config.get_text_config(),
        dtype=dtype,
        device=torch.device("cpu"),
        digest="tiny",
        context_length=512,
        eos_token_ids=(2,),
    )


class Driver:
    """Runs sequences through a runner; each has its own blocks, scattered over the arena."""

    def __init__(
        self, loaded: LoadedModel, *, block_size: int = 4, num_sequences: int = 4, statistics: Any = None
    ) -> None:
        self.layout = kv_layout(loaded.config, loaded.dtype, block_size, loaded.digest)
        self._per_sequence = 64
        self._num_sequences = num_sequences
        num_blocks = (self._per_sequence * num_sequences,) * len(self.layout.groups)
        self.arena = Arena(self.layout, num_blocks)
        self.runner = ModelRunner(loaded, self.arena, statistics)

    def row(
        self,
        sequence: int,
        token_ids: Sequence[int],
        start: int,
        sampling: SamplingParams | None = GREEDY,
        choice: int = 0,
    ) -> Row:
        end = start + len(token_ids)
        tables = tuple(self._table(sequence, start, end, group.window) for group in self.layout.groups)
        return Row(
            request_id=RequestId(str(sequence)),
            token_ids=tuple(token_ids),
            start=start,
            block_ids=tables,
            sampling=sampling,
            choice=choice,
        )

    def _table(self, sequence: int, start: int, end: int, window: int | None) -> tuple[BlockId | None, ...]:
        size = self.layout.block_size
        hidden = 0 if window is None else max(0, start - window + 1) // size
        ids = [sequence + self._num_sequences * (self._per_sequence - 1 - block) for block in range(-(-end // size))]
        return tuple(None if block < hidden else BlockId(found) for block, found in enumerate(ids))

    def logits(self, *rows: Row) -> torch.Tensor:
        return self.runner.forward(Batch(rows=rows))

    def run(self, *rows: Row) -> list[int | None]:
        return self.runner.run(Batch(rows=rows))


def eager_logits(loaded: LoadedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits (T, V) of the model's own attention over one whole sequence."""
    loaded.model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            logits: torch.Tensor = loaded.model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0]
    finally:
        loaded.model.set_attn_implementation(ATTENTION_NAME)
    return logits


def random_tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
