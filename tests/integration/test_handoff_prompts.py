"""What decode computes, and what it has cached, of prompts of particular lengths (CASES.md, A); blocks of 16 tokens."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from deployments.route import Route
from tests.integration.worker_pair import WorkerPair, golden, prompt, save_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1024)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(folder: Path) -> AsyncIterator[WorkerPair]:
    sizes = {"block_size": BLOCK, "prefill_chunk_tokens": 128, "max_batch_tokens": 128}
    async with WorkerPair(folder, num_blocks=256, **sizes) as pair:
        yield pair


async def test_decode_computes_nothing_of_a_prompt_of_1000_tokens_that_prefill_computed(
    pair: WorkerPair, folder: Path
) -> None:
    """Case 4: the whole prompt is computed once, and read once."""
    before = pair.sample("decode").counters["prompt_tokens_computed_total"]

    tokens, route = await pair.ask(prompt(1000, seed=1), max_tokens=4)

    assert tokens == await golden(folder, prompt(1000, seed=1), 4)
    assert (route.provenance.prefill_computed_tokens, route.provenance.blocks_moved) == (1000, 63)
    await pair.until_baseline()
    assert pair.sample("decode").counters["prompt_tokens_computed_total"] - before <= 1


async def test_the_cached_tokens_of_a_hand_off_are_whole_blocks_of_its_own_prompt(
    pair: WorkerPair, folder: Path
) -> None:
    """Case 17."""
    (first, cold), (second, warm) = await ask_twice(pair, prompt(87, seed=2))

    assert first == second == await golden(folder, prompt(87, seed=2))
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 80)


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 895])
async def test_a_full_hit_on_decode_computes_at_least_one_token_and_changes_nothing(
    pair: WorkerPair, folder: Path, length: int
) -> None:
    """Case 20, rule 14: exactly what is counted as cached is left out."""
    tokens = prompt(length, seed=length)
    held = (length - 1) // BLOCK * BLOCK

    (first, _), (second, warm) = await ask_twice(pair, tokens)

    assert first == second == await golden(folder, tokens)
    assert (warm.cached_tokens, warm.provenance.prefill_worker) == (held, "")
    assert warm.provenance.decode_computed_tokens == length - held >= 1
    await pair.until_baseline()


@pytest.mark.slow
async def test_each_of_300_blocks_arrives_as_it_was(tmp_path: Path) -> None:
    """Case 34, for hand-offs: owner and reader compare a digest of every block."""
    long = save_tiny_model(tmp_path, max_position_embeddings=4900)
    sizes = {"block_size": BLOCK, "prefill_chunk_tokens": 256, "max_batch_tokens": 256}
    async with WorkerPair(long, num_blocks=310, handoff={"digest": True}, **sizes) as pair:
        tokens, route = await pair.ask(prompt(4800), max_tokens=8)

        assert tokens == await golden(long, prompt(4800))
        assert (route.provenance.blocks_moved, route.provenance.decode_computed_tokens) == (300, 0)
        await pair.until_baseline()
        assert pair.sample("decode").counters["digest_mismatch_total"] == 0


async def ask_twice(pair: WorkerPair, tokens: list[int]) -> list[tuple[list[int], Route]]:
    """Once cold, and again when the registry has heard of the blocks."""
    cold = await pair.ask(tokens, name=f"cold {len(tokens)}")
    await asyncio.sleep(0.2)
    return [cold, await pair.ask(tokens, name=f"warm {len(tokens)}")]
