"""Checkpoints of tiny models on disk: safetensors and GGUF."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf.quants import quantize
from tokenizers import pre_tokenizers

from tests.unit.engine.tiny_models import make_config, make_weights_matter


def make_reference(kind: str = "llama") -> Any:
    """A model of transformers, whose own attention it keeps."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(make_config(kind), attn_implementation="eager")
    make_weights_matter(model)
    model.generation_config.eos_token_id = [2, 5]
    return model.eval()


def save_checkpoint(folder: Path, kind: str = "llama", **save: Any) -> Path:
    make_reference(kind).save_pretrained(folder, **save)
    return folder


def reference_logits(model: Any, token_ids: Iterable[int]) -> torch.Tensor:
    """(T, V)."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0]
    return logits


def save_gguf(file: Path, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32) -> Path:
    """Write the tiny Llama as GGUF; matrices are stored as `kind`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    model = make_reference()
    writer = gguf.GGUFWriter(str(file), "llama")
    _write_sizes(writer, model.config)
    _write_tokenizer(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3)
    for name, value in model.state_dict().items():
        stored = names.get_name(name, (".weight",))
        assert stored is not None
        array = _in_gguf_order(name, value.numpy())
        if value.dim() == 1:
            writer.add_tensor(stored, array)
        else:
            writer.add_tensor(stored, quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _write_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)


def _write_tokenizer(writer: gguf.GGUFWriter) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "<bos>", "<eos>", *letters, "he", "ll", "hell"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *(1 for _ in tokens[3:])])
    writer.add_token_merges(["h e", "l l", "he ll"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _in_gguf_order(name: str, value: np.ndarray) -> np.ndarray:
    """Rows of queries and keys as the GGUF rotary embedding wants them: pairs side by side."""
    num_heads = 4 if "q_proj" in name else 2 if "k_proj" in name else 0
    if not num_heads:
        return np.ascontiguousarray(value)
    halves = value.reshape(num_heads, 2, -1, value.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))
