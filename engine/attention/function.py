"""The attention function that transformers' model code calls, registered under `ATTENTION_NAME`.

It holds no state: the step's blocks and index tensors come through the forward call as the keyword `kv_step`, so any
number of runners live in one process. No mask function is registered under the name, hence model code builds no mask.
"""

from typing import Any, NamedTuple, Protocol

import torch
from transformers import AttentionInterface

from messages.errors import ModelRefused

ATTENTION_NAME = "kvferry"
STEP_ARGUMENT = "kv_step"


class Score(NamedTuple):
    """How the model code wants scores to be made of queries and keys."""

    scale: float | None
    """Factor of the dot products; None: one over the root of the head dim."""
    softcap: float | None
    """Scores are squeezed into (-softcap, softcap); None: they are not."""
    window: int | None
    """Tokens that a query sees at most; None: not said."""


class AttentionStep(Protocol):
    """One forward pass over the arena; knows positions, blocks and masks of all tokens."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score: Score
    ) -> torch.Tensor:
        """Store the new keys and values of a layer, then attend to all that the tokens may see.

        Args:
            layer: Number of the layer.
            query: (H, T, D); all new tokens of the step, packed.
            key: (H_kv, T, D), rotated as the model wants.
            value: (H_kv, T, D_v).
            score: How scores are made of queries and keys.

        Returns:
            (T, H, D_v).
        """


def arena_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend over the arena; the signature is transformers'.

    Args:
        module: The attention module, for its layer number.
        query: (1, H, T, D).
        key: (1, H_kv, T, D).
        value: (1, H_kv, T, D_v).
        attention_mask: Must be None.
        options: `kv_step` is the running `AttentionStep`; `scaling`, `softcap` and `sliding_window` are honoured;
            others repeat what the step knows (positions) or ask for what cannot be given (sinks), which is refused.

    Returns:
        (1, T, H, D_v) and None in place of the weights.

    Raises:
        ModelRefused: The model code calls us in a way that would give wrong results.
    """
    step: AttentionStep | None = options.get(STEP_ARGUMENT)
    if step is None:
        raise ModelRefused("the model code does not hand its keyword arguments on to attention")
    if attention_mask is not None or options.get("s_aux") is not None:
        raise ModelRefused("the model needs its own attention mask or sinks")
    if options.get("dropout") or query.shape[0] != 1:
        raise ModelRefused("attention is not called for inference on packed tokens")
    score = Score(options.get("scaling"), options.get("softcap"), options.get("sliding_window"))
    return step.attend(module.layer_idx, query[0], key[0], value[0], score).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, arena_attention)
