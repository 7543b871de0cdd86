"""Models that must pass the load probe and models that must not."""

from dataclasses import replace

import pytest
import torch

from engine.probe import probe
from messages.errors import ModelRefused
from tests.unit.engine.tiny_models import Driver, eager_logits, make_config, make_model, random_tokens


@pytest.mark.parametrize("kind", ["llama", "llama-mqa", "mistral", "qwen3", "gemma2", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_known_architectures_pass(kind: str, dtype: torch.dtype) -> None:
    result = probe(make_model(kind, dtype))

    assert result.attention_calls == 9


def test_a_model_that_never_calls_our_attention_is_refused() -> None:
    with pytest.raises(ModelRefused, match="do not all call our attention"):
        probe(make_model("bloom"))


def test_a_window_that_the_model_does_not_have_is_refused() -> None:
    loaded = make_model("llama")
    config = make_config("llama")
    config.sliding_window = 9

    with pytest.raises(ModelRefused, match="packed logits differ"):
        probe(replace(loaded, config=config))


def test_kv_heads_that_the_model_does_not_have_are_refused() -> None:
    config = make_config("llama")
    config.num_key_value_heads = 4

    with pytest.raises(ModelRefused, match="another shape"):
        probe(replace(make_model("llama"), config=config))


def test_the_model_serves_after_the_probe() -> None:
    loaded = make_model("qwen3")
    prompt = random_tokens(12)

    probe(loaded)

    driver = Driver(loaded)
    torch.testing.assert_close(
        driver.logits(driver.row(0, prompt, 0))[0], eager_logits(loaded, prompt)[-1], rtol=1e-4, atol=1e-4
    )
