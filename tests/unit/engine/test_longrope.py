"""longrope: one set of factors for all requests, chosen by the context length, and in the fingerprint."""

from pathlib import Path

import pytest
import torch

from engine.probe import probe
from engine.weights import kv_layout, load_model
from tests.unit.engine.tiny_checkpoints import make_reference, reference_logits, save_checkpoint
from tests.unit.engine.tiny_models import Driver, random_tokens

ORIGINAL = 32


@pytest.mark.parametrize(("context_length", "num_tokens"), [(None, 40), (33, 40), (ORIGINAL, 20)])
def test_logits_are_those_of_the_library_for_prompts_of_the_chosen_set(
    tmp_path: Path, context_length: int | None, num_tokens: int
) -> None:
    folder = save_checkpoint(tmp_path, "phi3-longrope")
    loaded = load_model(folder, torch.float32, "cpu", context_length=context_length)
    driver, prompt = Driver(loaded), random_tokens(num_tokens)

    driver.logits(driver.row(0, prompt[:9], 0))
    ours = driver.logits(driver.row(0, prompt[9:], 9))[0]

    expected = reference_logits(make_reference("phi3-longrope"), prompt)[-1]
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_a_short_request_does_not_change_when_a_long_one_joins_its_batch(tmp_path: Path) -> None:
    loaded = load_model(save_checkpoint(tmp_path, "phi3-longrope"), torch.float32, "cpu")
    short, long = random_tokens(9, 1), random_tokens(60, 2)
    alone, together = Driver(loaded), Driver(loaded)

    first = alone.logits(alone.row(0, short, 0))[0]
    joined = together.logits(together.row(0, short, 0), together.row(1, long, 0))[0]

    torch.testing.assert_close(joined, first, rtol=1e-4, atol=1e-4)


def test_the_set_is_part_of_the_fingerprint_and_passes_the_probe(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "phi3-longrope")
    models = [load_model(folder, torch.float32, "cpu", context_length=length) for length in (ORIGINAL, 64, None)]
    short, long, longest = (kv_layout(model.config, torch.float32, 16, model.digest).fingerprint for model in models)

    assert short != long == longest
    assert [model.context_length for model in models] == [ORIGINAL, 64, 512]
    for model in models:
        probe(model)
