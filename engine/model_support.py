"""What is known not to work, found in a model's configuration before any weight is read.

Each reason is one line. What cannot be seen here is left to the load probe.
"""

import re
from collections.abc import Callable
from typing import Any

from transformers import AutoModelForCausalLM

from messages.errors import ModelRefused

_KINDS = {"full_attention", "sliding_attention"}
_OTHER_INPUT = re.compile(r"vision|image|video|audio|speech|visual|codec|multimodal|projector")
_ALIBI = {"bloom", "mpt"}
_SINKS = {"gpt_oss"}


def refuse_unsupported(config: Any) -> None:
    """Refuse a model that would not run, or silently run wrong.

    Args:
        config: As transformers reads it, of the whole model.

    Raises:
        ModelRefused: With the reason.
    """
    text = config.get_text_config()
    for find in _FINDERS:
        reason = find(config, text)
        if reason is not None:
            raise ModelRefused(f"model of type {config.model_type}: {reason}")


def _kind_of_model(config: Any, text: Any) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder models are not supported; only decoders are"
    parts = sorted(name for name in getattr(config, "sub_configs", {}) if _OTHER_INPUT.search(name))
    if parts:
        return f"multimodal input ({', '.join(parts)}) is not supported; only models of text are"
    if type(text) not in AutoModelForCausalLM._model_mapping:  # noqa: SLF001 - no public way to ask
        return "transformers has no causal language model for it"
    return None


def _weights(config: Any, text: Any) -> str | None:
    quantized = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    # The values of a GGUF file are plain floats once they are read.
    if quantized and _quantizer(quantized) != "gguf":
        return f"quantized checkpoints ({_quantizer(quantized)}) are not supported; give float weights or a GGUF file"
    return None


def _attention(_: Any, text: Any) -> str | None:
    if getattr(text, "kv_lora_rank", None):
        return "multi-head latent attention (kv_lora_rank) is not supported"
    kinds = set(getattr(text, "layer_types", None) or ()) - _KINDS
    if kinds:
        return f"layers of kind {', '.join(sorted(kinds))} are not supported"
    if getattr(text, "alibi", False) or text.model_type in _ALIBI:
        return "ALiBi position biases are not supported"
    if text.model_type in _SINKS:
        return "attention sinks are not supported"
    if getattr(text, "num_kv_shared_layers", 0):
        return "layers that share the KV of others are not supported"
    if not isinstance(getattr(text, "num_key_value_heads", None) or 0, int):
        return "layers with different numbers of KV heads are not supported"
    if not isinstance(getattr(text, "max_position_embeddings", None), int):
        return "its configuration does not say how long its context may be"
    return None


def _rope(_: Any, text: Any) -> str | None:
    if "dynamic" in rope_types(getattr(text, "rope_parameters", None)):
        return "dynamic rope is not supported: its frequencies depend on the other requests of a batch"
    return None


def _state(_: Any, text: Any) -> str | None:
    if _model_class(text)._is_stateful:  # noqa: SLF001 - the library's own mark
        return "a recurrent state beside or instead of KV (state-space and hybrid models) is not supported"
    return None


def _code(_: Any, text: Any) -> str | None:
    if not _model_class(text)._supports_attention_backend:  # noqa: SLF001 - the library's own mark
        return "its code in transformers does not let the attention function be replaced"
    return None


_FINDERS: tuple[Callable[[Any, Any], str | None], ...] = (_kind_of_model, _weights, _state, _attention, _rope, _code)


def _model_class(text: Any) -> Any:
    return AutoModelForCausalLM._model_mapping[type(text)]  # noqa: SLF001 - no public way to ask


def rope_types(rope: Any) -> list[str]:
    """Find the rope types in one set of parameters, or in one set per layer kind."""
    if not isinstance(rope, dict):
        return []
    if "rope_type" in rope:
        return [str(rope["rope_type"])]
    return [kind for nested in rope.values() for kind in rope_types(nested)]


def _quantizer(quantized: Any) -> str:
    named = quantized if isinstance(quantized, dict) else vars(quantized)
    method = named.get("quant_method", "unknown")
    return str(getattr(method, "value", method))
