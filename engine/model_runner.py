"""A batch becomes one forward pass over packed tokens, and its logits one token per row that wants one."""

from itertools import accumulate, chain
from typing import Any

import torch

from engine.attention.function import STEP_ARGUMENT
from engine.attention.torch_backend import ArenaAttention, StatisticsHook
from engine.batch import Batch
from engine.sampler import sample
from engine.weights import LoadedModel
from kv_store.layout import Arena


def configure_threads(num_threads: int) -> None:
    """Set how many threads torch computes with in this process; for the process's owner alone to call."""
    torch.set_num_threads(num_threads)


class ModelRunner:
    """Runs one model over one arena, from one thread at a time; several runners may live in one process.

    Args:
        loaded: The model, loaded with our attention.
        arena: Where KV lies, on the model's device; its layout is the model's.
        statistics: Called per layer and step, or None.
    """

    def __init__(self, loaded: LoadedModel, arena: Arena, statistics: StatisticsHook | None = None) -> None:
        self._model = loaded.model
        self._device = loaded.device
        self._attention = ArenaAttention(arena, loaded.dtype, statistics)

    @property
    def num_attention_calls(self) -> int:
        """Layers that have attended, summed over all steps."""
        return self._attention.num_calls

    def run(self, batch: Batch) -> list[int | None]:
        """Compute a step: the KV of all its tokens lies in the blocks afterwards.

        Returns:
            Per row the token that follows it; None where the row does not sample.
        """
        sampling = [row for row in batch.rows if row.sampling is not None]
        with torch.inference_mode():
            logits = self.forward(batch)
            tokens = iter(sample(logits, sampling) if sampling else ())
        return [None if row.sampling is None else next(tokens) for row in batch.rows]

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute a step and return the logits (R, V) after the R rows that sample, in their order."""
        rows = batch.rows
        ends = accumulate(len(row.token_ids) for row in rows)
        last = [end - 1 for end, row in zip(ends, rows, strict=True) if row.sampling is not None]
        inputs: dict[str, Any] = {
            "input_ids": self._tensor(list(chain.from_iterable(row.token_ids for row in rows)))[None],
            "position_ids": self._tensor(list(chain.from_iterable(range(row.start, row.end) for row in rows)))[None],
            "logits_to_keep": self._tensor(last),
            "use_cache": False,
            STEP_ARGUMENT: self._attention.begin(batch),
        }
        logits: torch.Tensor = self._model(**inputs).logits
        return logits[0]

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)
