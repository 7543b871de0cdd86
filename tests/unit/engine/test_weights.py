"""Checkpoints on disk: what is loaded, in which dtype, with which layout, and what is refused."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.probe import probe
from engine.tokenizer import Tokenizer
from engine.weights import dtype_named, kv_layout, layer_windows, load_model, memory_needed_bytes, read_config
from messages.errors import ConfigError, ModelRefused
from tests.unit.engine.tiny_checkpoints import make_reference, reference_logits, save_checkpoint, save_gguf
from tests.unit.engine.tiny_models import SIZES, Driver, make_config, random_tokens


@pytest.mark.parametrize(
    ("kind", "save"), [("llama", {}), ("llama", {"max_shard_size": "100KB"}), ("llama-tied", {}), ("gpt2", {})]
)
def test_a_saved_checkpoint_loads_and_runs(tmp_path: Path, kind: str, save: dict[str, Any]) -> None:
    loaded = load_model(save_checkpoint(tmp_path, kind, **save), torch.float32, "cpu")
    driver, prompt = Driver(loaded), random_tokens(7)

    logits = driver.logits(driver.row(0, prompt, 0))

    torch.testing.assert_close(logits[0], reference_logits(make_reference(kind), prompt)[-1], rtol=1e-4, atol=1e-4)
    assert (loaded.context_length, loaded.eos_token_ids) == (512, (2, 5))
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_a_gguf_file_loads_passes_the_probe_and_runs(tmp_path: Path) -> None:
    loaded = load_model(save_gguf(tmp_path / "tiny.gguf"), torch.float32, "cpu")
    driver, prompt = Driver(loaded), random_tokens(7)

    probe(loaded)
    logits = driver.logits(driver.row(0, prompt, 0))

    torch.testing.assert_close(logits[0], reference_logits(make_reference(), prompt)[-1], rtol=1e-4, atol=1e-4)
    assert (loaded.context_length, loaded.eos_token_ids) == (512, (2,))


def test_quantized_gguf_becomes_plain_floats(tmp_path: Path) -> None:
    save_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0)

    loaded = load_model(tmp_path, torch.bfloat16, "cpu")

    name = "model.layers.1.mlp.up_proj.weight"
    torch.testing.assert_close(
        loaded.model.state_dict()[name].float(), make_reference().state_dict()[name], rtol=0.02, atol=0.01
    )
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    assert memory_needed_bytes(tmp_path, torch.bfloat16) == 2 * sum(p.numel() for p in loaded.model.parameters())


def test_the_tokenizer_of_a_gguf_file_is_in_it_unless_one_lies_beside_it(tmp_path: Path) -> None:
    file = save_gguf(tmp_path / "tiny.gguf")

    tokenizer = Tokenizer.load(file)
    assert tokenizer.decode(tokenizer.encode("hello 12")) == "hello 12"
    assert tokenizer.eos_ids == {2}

    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot load the tokenizer"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_the_asked_dtype_is_what_is_loaded(tmp_path: Path, stored: torch.dtype, wanted: str) -> None:
    make_reference().to(stored).save_pretrained(tmp_path)

    loaded = load_model(tmp_path, dtype_named(wanted), "cpu")

    assert {parameter.dtype for parameter in loaded.model.parameters()} == {dtype_named(wanted)}
    expected = make_reference().lm_head.weight.to(stored).to(dtype_named(wanted))
    assert torch.equal(loaded.model.lm_head.weight, expected)


@pytest.mark.parametrize("save", [{}, {"max_shard_size": "100KB"}])
def test_memory_is_known_before_loading(tmp_path: Path, save: dict[str, Any]) -> None:
    folder = save_checkpoint(tmp_path, **save)
    num_parameters = sum(p.numel() for p in make_reference().parameters())

    assert memory_needed_bytes(folder, torch.float32) == 4 * num_parameters
    assert memory_needed_bytes(folder, torch.bfloat16) == 2 * num_parameters


def test_progress_goes_from_nothing_to_all_in_every_stage(tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []

    load_model(save_checkpoint(tmp_path), torch.float32, "cpu", progress=lambda *report: seen.append(report))

    fractions = [fraction for stage, fraction in seen if stage == "loading weights"]
    assert seen[0] == ("checking the checkpoint", 0.0)
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert len(fractions) > 10


def test_weights_that_the_checkpoint_lacks_are_not_made_up(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path)
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: t for name, t in tensors.items() if "1.mlp.up" not in name}, weights, metadata={"format": "pt"})

    with pytest.raises(ConfigError, match=r"does not hold model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(folder, torch.float32, "cpu")


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))

    with pytest.raises(ConfigError, match=r"does not hold model\.layers\.0\.mlp\.\w+\.weight .*, nor 8 more"):
        load_model(folder, torch.float32, "cpu")


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


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        load_model(tmp_path / "nowhere", torch.float32, "cpu")


def test_unreadable_configs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ModelRefused, match="does not know"):
        read_config(tmp_path)

    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="JSON"):
        read_config(tmp_path)


def test_a_gguf_of_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "odd.gguf"), "no-such-model")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with pytest.raises(ModelRefused, match="no-such-model"):
        load_model(tmp_path, torch.float32, "cpu")


def test_an_unknown_dtype_name_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="int8"):
        dtype_named("int8")
