"""The numbers behind the tokens after a hand-off, against those of one worker that does everything (CASES.md, A)."""

from contextlib import aclosing
from pathlib import Path

import pytest
import torch

from tests.integration.worker_group import WorkerGroup
from tests.integration.worker_pair import VOCAB, WorkerPair, prompt, save_tiny_model

MODEL = {"dtype": "bfloat16", "block_size": 16}
BOUND = 1e-2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights large enough for the KV of every prompt token to show in what follows."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), initializer_range=0.2)


async def logprobs(pair: WorkerPair, tokens: list[int]) -> torch.Tensor:
    """Log probabilities, which are logits up to a constant, of the whole vocabulary at each new token, (4, V)."""
    route = await pair.route(tokens, max_tokens=4, name=f"from {tokens[0]}", logprobs=VOCAB, end_token_ids=())
    rows: list[list[float]] = []
    async with aclosing(route.tokens()) as events:
        async for event in events:
            rows.extend([logprob for _, logprob in sorted(entry.top)] for entry in event.logprobs)
    return torch.tensor(rows)


async def test_the_first_decode_step_after_a_hand_off_has_the_logits_of_one_worker(folder: Path) -> None:
    """Case 19: row 0 is sampled by prefill, row 1 by the first step of decode."""
    tokens, others = prompt(60), [50, *prompt(60)[1:]]
    async with WorkerGroup(folder, {"u": "unified"}, **MODEL) as alone:
        expected, of_others = [await logprobs(alone, given) for given in (tokens, others)]

    async with WorkerPair(folder, **MODEL) as pair:
        got = await logprobs(pair, tokens)
        await pair.until_baseline()
        blocks = pair.sample("decode").counters["transfer_blocks_total"]

    assert blocks == 4
    assert got.shape == expected.shape == (4, VOCAB)
    assert float((got[:2] - expected[:2]).abs().max()) < BOUND
    # The bound would notice the KV of one wrong token.
    assert float((of_others[1] - expected[1]).abs().max()) > 10 * BOUND
