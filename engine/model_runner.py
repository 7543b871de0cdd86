"""A batch becomes one forward pass over packed tokens, and its logits one token per row that wants one."""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import torch

from engine.attention.function import STEP_ARGUMENT
from engine.attention.torch_backend import ArenaAttention, StatisticsHook
from engine.batch import Batch, Row, RowResult
from engine.host_memory import keep_freed_memory
from engine.logprobs import kept_places, token_logprobs
from engine.sampler import sample
from engine.weights import LoadedModel
from kv_store.layout import Arena
from kv_store.local_cache import BlockCopy
from messages.tokens import TokenLogprob


def configure_threads(num_threads: int) -> None:
    """Set how many threads torch computes with in this process, and that it keeps its memory; for its owner to call."""
    torch.set_num_threads(num_threads)
    keep_freed_memory()


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
        self._arena = arena
        self._attention = ArenaAttention(arena, loaded.dtype, statistics)

    @property
    def num_attention_calls(self) -> int:
        """Layers that have attended, summed over all steps."""
        return self._attention.num_calls

    def run(self, batch: Batch) -> list[RowResult]:
        """Compute a step: the KV of all its tokens lies in the blocks afterwards.

        Returns:
            One result per row.
        """
        with torch.inference_mode():
            results = _results(self.forward(batch), batch.rows)
        if self._device.type == "cuda" and all(row.sampling is None for row in batch.rows):
            # Others read the step's KV from now on, past this stream; rows that sample have waited for it already.
            torch.cuda.current_stream(self._device).synchronize()
        return results

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks inside the arena, in order."""
        for copy in copies:
            source, size = self._arena.block_range(copy.group, copy.source)
            target, _ = self._arena.block_range(copy.group, copy.target)
            self._arena.buffer[target : target + size] = self._arena.buffer[source : source + size]

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute a step and return the logits (K, V) at the K `kept_places` of all rows, in their order.

        When no row has targets, these are the logits after each row that samples.
        """
        rows = batch.rows
        firsts = accumulate((len(row.token_ids) for row in rows), initial=0)
        kept = [first + place for first, row in zip(firsts, rows, strict=False) for place in kept_places(row)]
        inputs: dict[str, Any] = {
            "input_ids": self._tensor(list(chain.from_iterable(row.token_ids for row in rows)))[None],
            "position_ids": self._tensor(list(chain.from_iterable(range(row.start, row.end) for row in rows)))[None],
            "logits_to_keep": self._tensor(kept),
            "use_cache": False,
            STEP_ARGUMENT: self._attention.begin(batch),
        }
        logits: torch.Tensor = self._model(**inputs).logits
        return logits[0]

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)


def _results(logits: torch.Tensor, rows: Sequence[Row]) -> list[RowResult]:
    """Sample and list log probabilities; `logits` (K, V) are those at the rows' `kept_places`."""
    ends = list(accumulate(len(kept_places(row)) for row in rows))
    sampling = [number for number, row in enumerate(rows) if row.sampling is not None]
    last = logits
    if any(row.targets for row in rows):
        last = logits[[ends[number] - 1 for number in sampling]]
    samples = dict(zip(sampling, sample(last, [rows[number] for number in sampling]) if sampling else (), strict=True))
    return [
        RowResult(samples=samples.get(number, ()), prompt_logprobs=_prompt_logprobs(logits, row, end))
        for number, (row, end) in enumerate(zip(rows, ends, strict=True))
    ]


def _prompt_logprobs(logits: torch.Tensor, row: Row, end: int) -> tuple[TokenLogprob, ...]:
    """Log probabilities of the row's targets; its kept logits end before `end`."""
    if not row.targets:
        return ()
    first = end - len(kept_places(row))
    found = token_logprobs(
        logits[first : first + len(row.targets)],
        [(target,) for target in row.targets],
        [row.num_prompt_logprobs] * len(row.targets),
    )
    return tuple(entry for (entry,) in found)
