"""Every supported architecture, packed and chunked, against transformers' own attention one request at a time."""

import pytest
import torch

from engine.batch import Row
from engine.probe import probe
from tests.unit.engine.tiny_models import SUPPORTED, Driver, eager_logits, make_model, random_tokens

WINDOWED = {"qwen2-windowed", "mistral", "mistral-window-of-blocks", "gemma2", "gemma3"}
PROMPTS = (random_tokens(41, 1), random_tokens(24, 2), random_tokens(9, 3), random_tokens(1, 4))
"""Two are longer than two windows."""
STEPS = (
    ((0, 0, 17), (3, 0, 1)),
    ((0, 17, 30), (1, 0, 12), (2, 0, 5)),
    ((3, 0, 1), (0, 30, 41), (1, 12, 23), (2, 5, 8)),
    ((1, 23, 24), (2, 8, 9)),
)
"""Per step: rows of (prompt, first position, end)."""


@pytest.mark.parametrize("kind", SUPPORTED)
def test_packed_chunks_give_the_logits_of_each_request_alone(kind: str) -> None:
    loaded = make_model(kind)
    driver = Driver(loaded)
    reference = [eager_logits(loaded, prompt) for prompt in PROMPTS]

    for step in STEPS:
        rows = [driver.row(number, PROMPTS[number][start:end], start) for number, start, end in step]
        expected = torch.stack([reference[number][end - 1] for number, _, end in step])

        torch.testing.assert_close(driver.logits(*rows), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", SUPPORTED)
def test_greedy_tokens_of_requests_in_one_batch_are_those_of_each_alone(kind: str) -> None:
    loaded = make_model(kind)
    driver = Driver(loaded)
    sequences = [list(prompt) for prompt in PROMPTS[1:3]]

    first = driver.run(*(driver.row(number, tokens, 0) for number, tokens in enumerate(sequences)))
    append(sequences, first)
    for _ in range(19):
        append(sequences, driver.run(*(next_row(driver, number, tokens) for number, tokens in enumerate(sequences))))

    for prompt, tokens in zip(PROMPTS[1:3], sequences, strict=True):
        best = eager_logits(loaded, tokens[:-1]).argmax(-1).tolist()
        assert tokens[len(prompt) :] == best[len(prompt) - 1 :]


@pytest.mark.parametrize("kind", SUPPORTED)
def test_a_long_decode_gives_the_logits_of_its_whole_sequence(kind: str) -> None:
    loaded = make_model(kind)
    driver = Driver(loaded)
    tokens = PROMPTS[0]

    driver.logits(driver.row(2, tokens[:11], 0))
    ours = [driver.logits(driver.row(2, [token], 11 + i))[0] for i, token in enumerate(tokens[11:])]

    torch.testing.assert_close(torch.stack(ours), eager_logits(loaded, tokens)[11:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", SUPPORTED)
def test_the_load_probe_passes(kind: str) -> None:
    assert probe(make_model(kind)).max_difference < 1e-4


@pytest.mark.parametrize("kind", sorted(WINDOWED))
def test_blocks_outside_the_window_are_holes_and_hold_nothing(kind: str) -> None:
    driver = Driver(make_model(kind))
    driver.logits(driver.row(0, PROMPTS[0][:40], 0))

    row = driver.row(0, PROMPTS[0][40:], 40)

    group = next(number for number, shape in enumerate(driver.layout.groups) if shape.window is not None)
    num_holes = row.block_ids[group].count(None)
    k, v = driver.arena.layer_views(driver.layout.groups[group].layers[0])
    num_written = sum(not bool(k[number].isnan().any() or v[number].isnan().any()) for number in range(k.shape[0]))
    assert num_holes == 8
    assert num_written == 11 - num_holes


def test_a_block_that_is_out_of_use_would_be_noticed() -> None:
    driver = Driver(make_model("llama"))
    driver.row(0, PROMPTS[0][:40], 0)
    driver.arena.buffer.fill_(0xFF)

    assert driver.logits(driver.row(0, PROMPTS[0][40:], 40)).isnan().all()


def append(sequences: list[list[int]], tokens: list[int | None]) -> None:
    for sequence, token in zip(sequences, tokens, strict=True):
        assert token is not None
        sequence.append(token)


def next_row(driver: Driver, number: int, tokens: list[int]) -> Row:
    return driver.row(number, tokens[-1:], len(tokens) - 1)
