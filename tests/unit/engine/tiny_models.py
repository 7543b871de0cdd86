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
_WINDOWED = {**SIZES, "head_dim": 16, "sliding_window": 9}
_EXPERTS = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
_LONG_FACTORS = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.02 * i for i in range(8)],
    "long_factor": [1.0 + 0.5 * i for i in range(8)],
}
_MAKERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama-mha": lambda: transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 4}),
    "llama-mqa": lambda: transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 1, "head_dim": 24}),
    "llama-tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen2-windowed": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **_EXPERTS, head_dim=16),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=9),
    "mistral-window-of-blocks": lambda: transformers.MistralConfig(**SIZES, sliding_window=8),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "gemma2": lambda: transformers.Gemma2Config(
        **_WINDOWED, query_pre_attn_scalar=16, attn_logit_softcapping=1.5, final_logit_softcapping=4.0
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_WINDOWED, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "phi3": lambda: transformers.Phi3Config(**SIZES),
    "phi3-longrope": lambda: transformers.Phi3Config(
        **SIZES, original_max_position_embeddings=32, rope_parameters=dict(_LONG_FACTORS)
    ),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(
        **{name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=97, n_embd=64, n_layer=3, n_head=4, n_positions=512, bos_token_id=1, eos_token_id=2
    ),
    "bloom": lambda: transformers.BloomConfig(vocab_size=97, hidden_size=64, n_layer=3, n_head=4),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **SIZES, head_dim=16, sliding_window=9, num_local_experts=4, num_experts_per_tok=2
    ),
}


SUPPORTED = [
    "llama", "llama-mha", "llama-mqa", "llama-tied", "qwen2", "qwen2-windowed", "qwen3", "qwen3-moe", "mistral",
    "mistral-window-of-blocks", "mixtral", "gemma2", "gemma3", "phi3", "olmo2", "gpt-neox", "gpt2",
]  # fmt: skip
"""Kinds that must run right."""


def make_config(kind: str) -> Any:
    return _MAKERS[kind]()


@cache
def make_model(kind: str = "llama", dtype: torch.dtype = torch.float32) -> LoadedModel:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        make_config(kind), dtype=dtype, attn_implementation=ATTENTION_NAME
    )
    make_weights_matter(model)
    return LoadedModel(
        model=model.eval().requires_grad_(requires_grad=False),
        config=model.config.get_text_config(),
        dtype=dtype,
        device=torch.device("cpu"),
        digest="tiny",
        context_length=512,
        eos_token_ids=(2,),
    )


def make_weights_matter(model: torch.nn.Module) -> None:
    """At the usual small initial weights attention hardly moves the logits, and a fault in it would go unseen."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)


class Driver:
    """Runs sequences through a runner; each has its own blocks, scattered over the arena.

    A block holds NaN from the start until a sequence writes into it, and again once no later token may see it. Whoever
    reads such a block, even under a mask, gets NaN logits.
    """

    def __init__(
        self, loaded: LoadedModel, *, block_size: int = 4, num_sequences: int = 4, statistics: Any = None
    ) -> None:
        self.layout = kv_layout(loaded.config, loaded.dtype, block_size, loaded.digest)
        self._per_sequence = 64
        self._num_sequences = num_sequences
        self._in_use: set[tuple[int, BlockId]] = set()
        num_blocks = (self._per_sequence * num_sequences,) * len(self.layout.groups)
        self.arena = Arena(self.layout, num_blocks)
        self.arena.buffer.fill_(0xFF)
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
        return Row(
            request_id=RequestId(str(sequence)),
            token_ids=tuple(token_ids),
            start=start,
            block_ids=tuple(self._table(sequence, start, end, group) for group in range(len(self.layout.groups))),
            sampling=sampling,
            choices=(choice,),
        )

    def _table(self, sequence: int, start: int, end: int, group: int) -> tuple[BlockId | None, ...]:
        size, window = self.layout.block_size, self.layout.groups[group].window
        num_hidden = 0 if window is None else max(0, start - window + 1) // size
        places = [sequence + self._num_sequences * (self._per_sequence - 1 - i) for i in range(-(-end // size))]
        table = [BlockId(place) for place in places]
        for block_id in table[:num_hidden]:
            self._fill(group, block_id, is_in_use=False)
        for block_id in table[num_hidden:]:
            self._fill(group, block_id, is_in_use=True)
        return (*(None for _ in table[:num_hidden]), *table[num_hidden:])

    def _fill(self, group: int, block_id: BlockId, *, is_in_use: bool) -> None:
        """Clear a block that comes into use, and fill one that goes out of use with NaN."""
        if is_in_use == ((group, block_id) in self._in_use):
            return
        first, size = self.arena.block_range(group, block_id)
        self.arena.buffer[first : first + size] = 0 if is_in_use else 0xFF
        self._in_use ^= {(group, block_id)}

    def logits(self, *rows: Row) -> torch.Tensor:
        return self.runner.forward(Batch(rows=rows))

    def run(self, *rows: Row) -> list[int | None]:
        """Token of each row; None where the row does not sample."""
        results = self.runner.run(Batch(rows=rows))
        return [result.samples[0].token_ids[0] if result.samples else None for result in results]


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
