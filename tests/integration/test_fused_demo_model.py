"""The rewritten demo model: token for token what transformers generates, in float32."""

import pytest
import torch
import transformers

from engine.demo_model import fetch_demo_model
from engine.fused_layers import fuse_layers
from engine.packed_linear import can_pack
from engine.probe import probe
from engine.weights import load_model
from tests.integration.test_demo_model_logits import LENGTHS, NUM_NEW, generate_together

pytestmark = pytest.mark.timeout(600)


@pytest.mark.skipif(not can_pack(torch.float32, torch.device("cpu")), reason="torch without oneDNN")
def test_greedy_tokens_of_fused_layers_equal_generate() -> None:
    folder = fetch_demo_model()
    loaded = load_model(folder, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(6)
    prompts = [torch.randint(3, 49_000, (length,), generator=generator).tolist() for length in LENGTHS]

    assert fuse_layers(loaded).fused_layers == 30
    probe(loaded)
    ours = generate_together(loaded, prompts)

    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    for prompt, tokens in zip(prompts, ours, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_NEW, eos_token_id=None, pad_token_id=2
        )
        assert tokens == expected[0, len(prompt) :].tolist()
