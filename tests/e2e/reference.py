"""Greedy output of plain transformers, and prompts of exact lengths to ask for."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deployments.demo_document import document

TIE = 1e-4
"""A first difference counts as equal only where the two top logits of the reference are closer than this."""
SPECIAL_LENGTHS = (1, 31, 32, 33, 63, 64, 65)


@dataclass
class Reference:
    """transformers' own generate, float32, one request at a time."""

    folder: Path

    @cached_property
    def _model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()

    def prompts(self, count: int, *, longest: int = 3000) -> list[list[int]]:
        """`count` prompts of 1 to `longest` tokens; none begins like another, of this or of another count."""
        text = AutoTokenizer.from_pretrained(self.folder)(document(400))["input_ids"]
        spread = [80 + (longest - 80) * step * step // max(1, (count - 8) ** 2) for step in range(count - 7)]
        lengths = [*SPECIAL_LENGTHS[: max(0, count)], *spread][:count]
        starts = [index * 211 + count * 17 for index in range(count)]
        return [
            [*text[start + 1 : start + length], 100 + index]
            for index, (start, length) in enumerate(zip(starts, lengths, strict=True))
        ]

    def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Greedy continuation of `prompt`."""
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens
            )
        return out[0, len(prompt) :].tolist()

    def is_same(self, prompt: list[int], expected: list[int], got: list[int]) -> bool:
        """Whether `got` equals `expected` up to a tie, which is printed."""
        if got == expected:
            return True
        at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None)
        if at is None:
            return False
        with torch.inference_mode():
            logits = self._model(torch.tensor([prompt + expected[:at]])).logits[0, -1]
        best = logits.topk(2)
        gap = float(best.values[0] - best.values[1])
        print(f"prompt of {len(prompt)} tokens: first difference at {at}, top logits {gap:.2e} apart")
        return gap < TIE and {expected[at], got[at]} == set(best.indices.tolist())
