"""Leaving a request in states of its decode worker that real processes are slow to bring about (rule 4).

The other states are windows of test_failure_windows.py.
"""

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from tests.integration.worker_pair import WorkerPair, golden, is_free, prompt, save_tiny_model

BLOCK = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


async def test_leaving_while_decode_has_no_room_frees_prefill_at_once(folder: Path) -> None:
    """Rule 4: prefill is done, decode allocates; the lease of 30 s is only the backstop."""
    slow = "engine.decode_step:delay=0.05@decode"
    async with WorkerPair(folder, num_blocks=12, lease_s=30.0, block_size=BLOCK, faults=slow) as pair:
        holding = asyncio.create_task(pair.ask(prompt(100), max_tokens=40, name="holding", end_token_ids=()))
        await pair.until(lambda: pair.sample("decode").running == 1 and is_free(pair.sample("prefill")))
        # It takes 7 blocks, and as many are asked for of the 5 that are left.
        leaving = asyncio.create_task(pair.ask(prompt(100, seed=1), name="leaving"))
        await pair.until(lambda: pair.sample("decode").waiting == 1 and pair.sample("prefill").handoffs == 1)

        leaving.cancel()
        await asyncio.wait([leaving])

        await pair.until(lambda: is_free(pair.sample("prefill")), timeout_s=1.0)
        await pair.until(lambda: pair.sample("decode").waiting == 0, timeout_s=1.0)
        expected = await golden(folder, prompt(100), 40)
        assert (await holding)[0][: len(expected)] == expected
        await pair.until_baseline()


async def test_leaving_while_decode_is_preempted_gives_everything_back(folder: Path) -> None:
    """Rule 4: it has lost its blocks, and computes them again."""
    slow = "engine.prefill_chunk:delay=0.3@decode"
    async with WorkerPair(folder, preempts_each_once=True, block_size=BLOCK, faults=slow) as pair:
        route = await pair.route(prompt(60), max_tokens=30, end_token_ids=())
        tokens: list[int] = []
        async with aclosing(route.tokens()) as events:
            while len(tokens) < 3:
                tokens.extend((await anext(events)).token_ids)
            await pair.until(lambda: pair.sample("decode").counters["preemptions_total"] == 1)

        assert tokens == (await golden(folder, prompt(60), 3))[: len(tokens)]
        await pair.until_baseline()
        again, _ = await pair.ask(prompt(60), max_tokens=12, name="again")
        assert again == await golden(folder, prompt(60), 12)
        await pair.until_baseline()
