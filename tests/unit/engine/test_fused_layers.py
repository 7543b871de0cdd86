"""Rewritten layers give what the model gives; layers that are not understood stay as they are."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from engine.fused_layers import fuse_layers
from engine.packed_linear import PackedLinear, can_pack, pack_linears
from engine.probe import probe
from engine.weights import LoadedModel
from tests.unit.engine.tiny_models import SUPPORTED, Driver, eager_logits, make_model, random_tokens

LIKE_LLAMA = [
    "llama", "llama-mha", "llama-mqa", "llama-tied", "qwen2", "qwen2-windowed", "qwen3", "mistral",
    "mistral-window-of-blocks",
]  # fmt: skip
pytestmark = pytest.mark.skipif(not can_pack(torch.float32, torch.device("cpu")), reason="torch without oneDNN")


def copy_of(kind: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    loaded = make_model(kind, dtype)
    return replace(loaded, model=copy.deepcopy(loaded.model))


@pytest.mark.parametrize("kind", SUPPORTED)
def test_a_rewritten_model_gives_the_logits_of_the_untouched_one(kind: str) -> None:
    loaded = copy_of(kind)
    tokens = random_tokens(40)

    report = fuse_layers(loaded)
    driver = Driver(loaded)
    ours = torch.cat(
        [driver.logits(driver.row(0, tokens[first:end], first)) for first, end in ((0, 33), (33, 39), (39, 40))]
    )

    expected = eager_logits(make_model(kind), tokens)[[32, 38, 39]]
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert (report.fused_layers == 3) == (kind in LIKE_LLAMA)
    assert probe(loaded).attention_calls > 0


def test_bfloat16_is_as_close_to_float32_as_the_untouched_model() -> None:
    if not can_pack(torch.bfloat16, torch.device("cpu")):
        pytest.skip("no packed bfloat16 products on this processor")
    tokens = random_tokens(30)
    plain, fused = copy_of("llama", torch.bfloat16), copy_of("llama", torch.bfloat16)
    wide = replace(plain, model=copy.deepcopy(plain.model).float(), dtype=torch.float32)

    assert fuse_layers(fused).fused_layers == 3
    truth = eager_logits(wide, tokens)[-1]
    errors = []
    for loaded in (plain, fused):
        driver = Driver(loaded)
        errors.append(float((driver.logits(driver.row(0, tokens, 0))[0].float() - truth).square().mean().sqrt()))

    assert errors[1] < 1.5 * errors[0] + 0.01 * float(truth.std())


def test_a_layer_that_computes_something_else_under_the_same_names_is_left_alone() -> None:
    loaded = copy_of("llama")
    layer: Any = loaded.model.model.layers[1]
    original = type(layer).forward

    def doubled(*arguments: Any, **options: Any) -> Any:
        return 2 * original(layer, *arguments, **options)

    layer.forward = doubled

    assert fuse_layers(loaded).fused_layers == 2
    assert layer.forward is doubled


@pytest.mark.parametrize("has_bias", [True, False])
def test_packed_layers_side_by_side_give_each_ones_output(*, has_bias: bool) -> None:
    linears = [
        nn.Linear(24, out, bias=has_bias and out != 8).requires_grad_(requires_grad=False) for out in (16, 8, 40)
    ]
    x, residual = torch.randn(2, 5, 24), torch.randn(2, 5, 64)

    packed = PackedLinear.of(linears)

    expected = torch.cat([linear(x) for linear in linears], dim=-1)
    torch.testing.assert_close(packed(x), expected)
    torch.testing.assert_close(packed.add(x, residual), expected + residual)
    assert torch.equal(packed.weight, torch.cat([linear.weight for linear in linears]))


def test_packing_replaces_only_plain_linear_layers() -> None:
    class Special(nn.Linear):
        pass

    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Special(4, 4), nn.Linear(4, 2))).requires_grad_(
        requires_grad=False
    )
    x = torch.randn(3, 4)
    expected = module(x)

    assert pack_linears(module) == 2

    torch.testing.assert_close(module(x), expected)
    assert isinstance(module[1][0], Special)
