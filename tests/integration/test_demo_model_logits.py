"""The real demo model through packed, chunked steps: token for token what transformers generates."""

from pathlib import Path

import pytest
import torch
import transformers

from engine.batch import Batch, Row
from engine.demo_model import fetch_demo_model
from engine.model_runner import ModelRunner
from engine.probe import probe
from engine.weights import LoadedModel, kv_layout, load_model
from kv_store.layout import Arena
from messages.handoff import BlockId
from messages.requests import RequestId, SamplingParams

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
LENGTHS = (1, 31, 33, 200)
NUM_NEW, CHUNK, BLOCK, BLOCKS_EACH = 48, 64, 32, 16
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def folder() -> Path:
    return fetch_demo_model()


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder, torch.float32, "cpu")


def make_row(number: int, tokens: list[int], start: int, *, complete: bool) -> Row:
    end = start + len(tokens)
    ids = tuple(BlockId(number + len(LENGTHS) * block) for block in range(-(-end // BLOCK)))
    sampling = GREEDY if complete else None
    return Row(
        request_id=RequestId(str(number)), token_ids=tuple(tokens), start=start, block_ids=(ids,), sampling=sampling
    )


def generate_together(loaded: LoadedModel, prompts: list[list[int]]) -> list[list[int]]:
    """All prompts at once: each step gives a running sequence one token and a waiting one its next chunk."""
    layout = kv_layout(loaded.config, loaded.dtype, BLOCK, loaded.digest)
    runner = ModelRunner(loaded, Arena(layout, (BLOCKS_EACH * len(prompts),)))
    sequences, computed = [list(prompt) for prompt in prompts], [0] * len(prompts)
    while unfinished := [i for i, s in enumerate(sequences) if len(s) < len(prompts[i]) + NUM_NEW]:
        rows = []
        for number in unfinished:
            start, known = computed[number], len(sequences[number])
            end = min(known, start + CHUNK)
            rows.append(make_row(number, sequences[number][start:end], start, complete=end == known))
            computed[number] = end
        for number, result in zip(unfinished, runner.run(Batch(rows=tuple(rows))), strict=True):
            sequences[number].extend(token_id for sample in result.samples for token_id in sample.token_ids)
    return [sequence[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]


def test_greedy_tokens_equal_generate(folder: Path, loaded: LoadedModel) -> None:
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 49_000, (length,), generator=generator).tolist() for length in LENGTHS]

    ours = generate_together(loaded, prompts)

    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    for prompt, tokens in zip(prompts, ours, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_NEW, eos_token_id=None, pad_token_id=2
        )
        assert tokens == expected[0, len(prompt) :].tolist()


def test_the_demo_model_passes_the_probe(folder: Path, loaded: LoadedModel) -> None:
    assert probe(loaded).attention_calls == 90
    assert probe(load_model(folder, torch.bfloat16, "cpu")).attention_calls == 90


def test_the_checkpoint_has_its_tokenizer_template_and_end_token(folder: Path, loaded: LoadedModel) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )

    assert loaded.eos_token_ids == (tokenizer.eos_token_id,) == (2,)
    assert loaded.context_length == 8192
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert chat.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    # Digits stand apart, and a space before them does not join the spaces before it.
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("x   42")) == ["x", "ĠĠĠ", "4", "2"]
