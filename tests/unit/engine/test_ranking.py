"""The highest logits, the same whatever else is asked for."""

import pytest
import torch

from engine.ranking import best
from tests.unit.engine.sampled_rows import random_logits


@pytest.mark.parametrize("width", [1, 5, 64, 65, 700, 3000])
@pytest.mark.parametrize("spread", [0.0, 0.05, 1.0, 1e30])
def test_the_order_is_by_value_and_then_by_id(width: int, spread: float) -> None:
    logits = (random_logits(3, vocab=3000) * spread).bfloat16().float()
    logits[1, ::3] = float("-inf")
    logits[2, 5] = -0.0

    values, ids = best(logits, width)

    expected, order = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, expected[:, :width])
    assert torch.equal(ids, order[:, :width])
