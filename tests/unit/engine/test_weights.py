"""Checkpoints on disk: what is loaded, named and refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.weights import (
    checkpoint_digest,
    dtype_named,
    kv_layout,
    layer_windows,
    load_model,
    memory_needed_bytes,
    read_config,
    refuse_unsupported,
)
from messages.errors import ConfigError, ModelRefused
from tests.unit.engine.tiny_models import SIZES, Driver, eager_logits, make_config, random_tokens


def save_checkpoint(folder: Path, kind: str = "llama", **save: Any) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(make_config(kind))
    model.generation_config.eos_token_id = [2, 5]
    model.save_pretrained(folder, **save)
    return folder


def test_a_saved_checkpoint_loads_and_runs(tmp_path: Path) -> None:
    loaded = load_model(save_checkpoint(tmp_path), torch.float32, "cpu")
    driver, prompt = Driver(loaded), random_tokens(7)

    logits = driver.logits(driver.row(0, prompt, 0))

    torch.testing.assert_close(logits[0], eager_logits(loaded, prompt)[-1], rtol=1e-4, atol=1e-4)
    assert (loaded.context_length, loaded.eos_token_ids) == (512, (2, 5))
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_the_asked_dtype_is_what_is_loaded(tmp_path: Path) -> None:
    loaded = load_model(save_checkpoint(tmp_path), dtype_named("bfloat16"), "cpu")

    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("shard", ["5GB", "100KB"])
def test_memory_is_known_before_loading(tmp_path: Path, shard: str) -> None:
    folder = save_checkpoint(tmp_path, max_shard_size=shard)
    num_parameters = sum(p.numel() for p in load_model(folder, torch.float32, "cpu").model.parameters())

    assert memory_needed_bytes(folder, torch.float32) == 4 * num_parameters
    assert memory_needed_bytes(folder, torch.bfloat16) == 2 * num_parameters


def test_the_digest_depends_on_weights_and_config_and_not_on_the_place(tmp_path: Path) -> None:
    here, there = save_checkpoint(tmp_path / "a"), save_checkpoint(tmp_path / "b")
    same = checkpoint_digest(here)

    assert checkpoint_digest(there) == same

    tensors = load_file(there / "model.safetensors")
    changed = {name: value + 1 if "layers.2.mlp.up" in name else value for name, value in tensors.items()}
    save_file(changed, there / "model.safetensors", metadata={"format": "pt"})
    assert checkpoint_digest(there) != same

    config = json.loads((here / "config.json").read_text())
    (here / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))
    assert checkpoint_digest(here) != same


def test_groups_follow_the_attention_kinds() -> None:
    full = kv_layout(make_config("llama"), torch.float32, 32, "d")
    hybrid = kv_layout(make_config("gemma3"), torch.bfloat16, 16, "d")

    assert [(g.layers, g.window, g.num_kv_heads, g.k_dim, g.codec) for g in full.groups] == [
        ((0, 1, 2), None, 2, 16, "raw-float32")
    ]
    assert [(g.name, g.layers, g.window, g.codec) for g in hybrid.groups] == [
        ("sliding", (0, 2), 9, "raw-bfloat16"),
        ("full", (1,), None, "raw-bfloat16"),
    ]


def test_windows_that_are_switched_off_do_not_count() -> None:
    assert layer_windows(transformers.Qwen2Config(**SIZES, sliding_window=9, use_sliding_window=False)) == (None,) * 3
    assert layer_windows(make_config("mistral")) == (9,) * 3


def test_the_fingerprint_depends_on_rope() -> None:
    other = make_config("llama")
    other.rope_parameters = {"rope_type": "default", "rope_theta": 5.0}

    layouts = [kv_layout(config, torch.float32, 32, "d") for config in (make_config("llama"), other)]

    assert layouts[0].fingerprint != layouts[1].fingerprint


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.T5Config(), "encoder-decoder"),
        (transformers.DeepseekV3Config(), "latent attention"),
        (
            transformers.LlamaConfig(
                **SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
            ),
            "dynamic rope",
        ),
        (transformers.LlamaConfig(**SIZES, quantization_config={"quant_method": "gptq"}), "quantized"),
        (transformers.Llama4TextConfig(**SIZES), "chunked_attention"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(config: Any, reason: str) -> None:
    with pytest.raises(ModelRefused, match=reason):
        refuse_unsupported(config)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        load_model(tmp_path / "nowhere", torch.float32, "cpu")

    folder = save_checkpoint(tmp_path / "cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a complete"):
        load_model(folder, torch.float32, "cpu")

    weights.unlink()
    with pytest.raises(ConfigError, match=r"no \.safetensors file"):
        load_model(folder, torch.float32, "cpu")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, max_shard_size="100KB")
    lost = sorted(folder.glob("model-*.safetensors"))[1]
    lost.unlink()

    with pytest.raises(ConfigError, match=lost.name):
        load_model(folder, torch.float32, "cpu")


def test_unreadable_configs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ModelRefused, match="does not know"):
        read_config(tmp_path)

    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="JSON"):
        read_config(tmp_path)


def test_a_model_that_cannot_take_our_attention_is_refused(tmp_path: Path) -> None:
    config = transformers.FalconConfig(vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    with pytest.raises(ModelRefused, match="cannot load"):
        load_model(tmp_path, torch.float32, "cpu")


def test_an_unknown_dtype_name_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="int8"):
        dtype_named("int8")
