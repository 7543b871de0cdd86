"""longrope has two sets of factors; which one is used is settled once, by the context length that is served.

The library takes the long set as soon as any position of a batch is beyond the original context, so that one request
would change the keys of another. KV of the two sets does not mix: the choice is part of the layout's fingerprint.
"""

from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from messages.errors import ModelRefused

_CHOICE = "factor_set"


def settle_longrope(model: Any, context_length: int) -> None:
    """Fix the factor set of a model with longrope, and note it in its configuration; other models stay as they are.

    Args:
        model: A transformers causal language model.
        context_length: Most tokens of prompt and output that are served; beyond the original context: the long set.

    Raises:
        ModelRefused: longrope is used in some of the layers only.
    """
    config = model.config.get_text_config()
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict) and "longrope" in kind.values():
            raise ModelRefused("longrope in some layers only is not supported")
        if kind == "longrope":
            _settle(module, config, context_length)


def _settle(module: torch.nn.Module, config: Any, context_length: int) -> None:
    original = int(config.rope_parameters["original_max_position_embeddings"])
    is_long = context_length > original
    device = module.get_buffer("inv_freq").device
    inv_freq, scaling = ROPE_INIT_FUNCTIONS["longrope"](config, device, seq_len=original + 1 if is_long else original)
    module.register_buffer("inv_freq", inv_freq, persistent=False)
    module.attention_scaling = scaling
    # Under this name the library leaves the frequencies alone.
    module.rope_type = "settled"  # type: ignore[assignment]  # the library keeps text here
    config.rope_parameters = {**config.rope_parameters, _CHOICE: "long" if is_long else "short"}
