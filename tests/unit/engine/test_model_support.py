"""Models that are refused, and that each refusal says why."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.model_support import refuse_unsupported
from engine.probe import probe
from engine.weights import load_model
from messages.errors import ModelRefused
from tests.unit.engine.tiny_models import SIZES, SUPPORTED, make_config, make_model

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "t5": (transformers.T5Config, "t5: encoder-decoder"),
    "bart": (transformers.BartConfig, "bart: encoder-decoder"),
    "whisper": (transformers.WhisperConfig, "encoder-decoder"),
    "deepseek-v2": (transformers.DeepseekV2Config, r"multi-head latent attention \(kv_lora_rank\)"),
    "deepseek-v3": (transformers.DeepseekV3Config, "multi-head latent attention"),
    "gemma3-vision": (transformers.Gemma3Config, r"multimodal input \(vision_config\)"),
    "llava": (transformers.LlavaConfig, "multimodal input"),
    "qwen2-vl": (transformers.Qwen2VLConfig, "multimodal input"),
    "qwen2-audio": (transformers.Qwen2AudioConfig, r"multimodal input \(audio_config\)"),
    "llama4": (transformers.Llama4Config, "multimodal input"),
    "llama4-text": (lambda: transformers.Llama4TextConfig(**SIZES), "chunked_attention"),
    "dynamic-rope": (
        lambda: transformers.LlamaConfig(
            **SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        ),
        "dynamic rope is not supported: its frequencies depend on the other requests",
    ),
    "bloom": (lambda: make_config("bloom"), "ALiBi"),
    "mpt": (transformers.MptConfig, "ALiBi"),
    "falcon-alibi": (lambda: transformers.FalconConfig(alibi=True), "ALiBi"),
    "falcon": (transformers.FalconConfig, "does not let the attention function be replaced"),
    "gpt-oss": (lambda: make_config("gpt-oss"), "attention sinks"),
    "mamba": (transformers.MambaConfig, "recurrent state"),
    "mamba2": (transformers.Mamba2Config, "recurrent state"),
    "jamba": (transformers.JambaConfig, "recurrent state"),
    "bamba": (transformers.BambaConfig, "recurrent state"),
    "falcon-h1": (transformers.FalconH1Config, "recurrent state"),
    "zamba2": (transformers.Zamba2Config, "recurrent state"),
    "qwen3-next": (transformers.Qwen3NextConfig, "recurrent state"),
    "lfm2": (
        lambda: transformers.Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]),
        "layers of kind conv",
    ),
    "recurrent-gemma": (transformers.RecurrentGemmaConfig, "recurrent state"),
    "rwkv": (transformers.RwkvConfig, "recurrent state"),
    "gemma3n": (transformers.Gemma3nTextConfig, "share the KV of others"),
    "encoder": (transformers.ViTConfig, "no causal language model"),
    "gptq": (
        lambda: transformers.LlamaConfig(**SIZES, quantization_config={"quant_method": "gptq", "bits": 4}),
        r"quantized checkpoints \(gptq\)",
    ),
    "fp8": (
        lambda: transformers.LlamaConfig(**SIZES, quantization_config={"quant_method": "fp8"}),
        r"quantized checkpoints \(fp8\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_with_the_reason(name: str) -> None:
    make, reason = REFUSED[name]

    with pytest.raises(ModelRefused, match=reason):
        refuse_unsupported(make())


@pytest.mark.parametrize("kind", [*SUPPORTED, "phi3-longrope"])
def test_what_works_is_not_refused(kind: str) -> None:
    refuse_unsupported(make_config(kind))


def test_a_refusal_comes_before_any_weight_is_read(tmp_path: Path) -> None:
    make_config("gpt-oss").save_pretrained(tmp_path)

    with pytest.raises(ModelRefused, match="attention sinks"):
        load_model(tmp_path, torch.float32, "cpu")


@pytest.mark.parametrize(
    ("kind", "reason"), [("bloom", "do not all call our attention"), ("gpt-oss", "its own attention mask or sinks")]
)
def test_the_probe_finds_what_the_configuration_does_not_say(kind: str, reason: str) -> None:
    with pytest.raises(ModelRefused, match=reason):
        probe(make_model(kind))
