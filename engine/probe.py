"""A loaded model is served only after our path has given the same logits as the model's own attention.

Some architectures run silently wrong: their code never calls our function, or builds masks that we do not see. The
probe runs two short random prompts packed, in chunks and with a decode step, through a small arena of its own, and then
one by one with eager attention. A prompt is made longer than the model's windows where that is cheap; a window that is
longer still is only compared with what the model asks our attention for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.function import ATTENTION_NAME
from engine.batch import Batch, Row
from engine.model_runner import ModelRunner
from engine.weights import LoadedModel, kv_layout, layer_windows
from kv_store.layout import Arena
from messages.errors import ModelRefused, ServingError
from messages.handoff import BlockId
from messages.requests import RequestId, SamplingParams

Steps = tuple[tuple[tuple[int, int], ...], ...]
"""Per step, per prompt: the positions that it computes."""

_SHORT = 45
"""Tokens of the longer prompt."""
_LONG = 256
_CHEAP = 3e10
"""Weights times tokens; two passes of so much take a second or two on a few cores."""
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.15}
"""Difference of the logits of a position, root mean square, in their standard deviations."""
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """What the probe measured on a model that passed."""

    max_difference: float
    """Of the positions compared, the largest difference to eager logits: root mean square in standard deviations."""
    attention_calls: int


def probe(loaded: LoadedModel, block_size: int = 16) -> ProbeResult:
    """Compare packed, chunked logits with eager ones; the model is as before afterwards.

    Not to be called while a runner of the same model works: the model's attention is switched for a moment.

    Raises:
        ModelRefused: With the reason.
    """
    steps = _steps(_prompt_length(loaded))
    prompts = _prompts(loaded, steps)
    with _translated("our attention"):
        runner, ours = _packed(loaded, prompts, steps, block_size)
    expected_calls = len(steps) * int(loaded.config.num_hidden_layers)
    if runner.num_attention_calls != expected_calls:
        raise ModelRefused(
            "the model's layers do not all call our attention",
            calls=runner.num_attention_calls,
            expected=expected_calls,
        )
    with _translated("eager attention"):
        reference = _one_by_one(loaded, prompts)
    difference = _difference(ours, reference)
    # Not >, so that a NaN is refused too.
    if not difference <= _TOLERANCE[loaded.dtype]:
        raise ModelRefused(
            "packed logits differ from eager ones", std=f"{difference:.3g}", allowed=_TOLERANCE[loaded.dtype]
        )
    return ProbeResult(max_difference=difference, attention_calls=runner.num_attention_calls)


def _prompt_length(loaded: LoadedModel) -> int:
    """Long enough for every window that can be passed cheaply."""
    num_weights = sum(parameter.numel() for parameter in loaded.model.parameters())
    wanted = (window + 8 for window in layer_windows(loaded.config) if window is not None)
    most = min(_LONG, loaded.context_length)
    return max((length for length in wanted if length <= most and length * num_weights <= _CHEAP), default=_SHORT)


def _steps(length: int) -> Steps:
    length = max(length, _SHORT)
    return ((0, 20), (0, 7)), ((20, length - 1), (7, 8)), ((length - 1, length), (8, 9))


def _prompts(loaded: LoadedModel, steps: Steps) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = [end for _, end in steps[-1]]
    vocab = int(loaded.config.vocab_size)
    return [torch.randint(vocab, (length,), generator=generator).tolist() for length in lengths]


def _packed(
    loaded: LoadedModel, prompts: list[list[int]], steps: Steps, block_size: int
) -> tuple[ModelRunner, dict[tuple[int, int], torch.Tensor]]:
    """Run all steps; return the logits after each (prompt, last position) of a step."""
    layout = kv_layout(loaded.config, loaded.dtype, block_size, loaded.digest)
    per_prompt = max(-(-len(prompt) // block_size) for prompt in prompts)
    num_blocks = per_prompt * len(prompts)
    runner = ModelRunner(loaded, Arena(layout, (num_blocks,) * len(layout.groups), loaded.device))
    # Interleaved from the top, so that a mistake in block ids shows.
    tables = [tuple(BlockId(b) for b in reversed(range(i, num_blocks, len(prompts)))) for i in range(len(prompts))]
    logits: dict[tuple[int, int], torch.Tensor] = {}
    for step in steps:
        rows = tuple(
            Row(
                request_id=RequestId(str(number)),
                token_ids=tuple(prompts[number][start:end]),
                start=start,
                block_ids=(tables[number][: -(-end // block_size)],) * len(layout.groups),
                sampling=_GREEDY,
            )
            for number, (start, end) in enumerate(step)
        )
        for number, row_logits in enumerate(runner.forward(Batch(rows=rows))):
            logits[number, step[number][1] - 1] = row_logits
    return runner, logits


@torch.inference_mode()
def _one_by_one(loaded: LoadedModel, prompts: list[list[int]]) -> list[torch.Tensor]:
    with _eager(loaded.model):
        inputs = [torch.tensor([prompt], device=loaded.device) for prompt in prompts]
        return [loaded.model(input_ids=ids, use_cache=False).logits[0] for ids in inputs]


@contextmanager
def _eager(model: Any) -> Iterator[None]:
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def _difference(ours: dict[tuple[int, int], torch.Tensor], reference: list[torch.Tensor]) -> float:
    worst = 0.0
    for (number, position), logits in ours.items():
        expected = reference[number][position].float()
        scaled = (logits.float() - expected).square().mean().sqrt() / expected.std()
        if not scaled <= worst:
            worst = float(scaled)
    return worst


@contextmanager
def _translated(path: str) -> Iterator[None]:
    try:
        yield
    except ServingError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelRefused(f"the model does not run with {path}: {reason}") from error
