"""Prefixes of which a block is lost, or was never whole: good up to there, computed from there (CASES.md, B)."""

import asyncio
from concurrent.futures import Future
from pathlib import Path

import pytest

from deployments.worker_views import prompt_keys
from messages.errors import ServingError, TransferError
from messages.handoff import BlockKey
from tests.integration.worker_group import WorkerGroup, warm
from tests.integration.worker_pair import WorkerPair, golden, prompt, save_tiny_model

BLOCK = 16
TWO = {"a": "unified", "b": "unified"}
TOKENS = prompt(100)
"""Six full blocks, and a part of one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def keys_of(pair: WorkerPair) -> list[BlockKey]:
    return prompt_keys(pair.request(TOKENS), pair.links.live()[0].record)


async def holders(pair: WorkerPair) -> dict[str, int]:
    """Blocks of the prompt's prefix that the registry says each worker holds."""
    return (await pair.registry.lookup(keys_of(pair))).by_worker


async def until_held(pair: WorkerPair, **num_blocks: int) -> None:
    """Wait until the registry has heard of exactly this."""
    async with asyncio.timeout(5):
        while await holders(pair) != num_blocks:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)


async def lose(pair: WorkerPair, worker_id: str, key: BlockKey) -> None:
    """Take one cached block away from a worker, and so all that follow it."""
    engine, done = pair.workers[worker_id]._engine, Future[None]()

    def command() -> tuple[()]:
        for group in engine._cache._groups:
            block_id = group.index.block_of(key)
            assert block_id is not None
            group.unindex(block_id)
        done.set_result(None)
        return ()

    engine._commands.put(command)
    await asyncio.wrap_future(done)


@pytest.mark.parametrize("place", ["registry", "lender"])
async def test_a_prefix_that_lost_its_middle_block_is_reused_up_to_there(folder: Path, place: str) -> None:
    """Case 32: block 3 is the first bad one, whoever lost it."""
    async with WorkerGroup(folder, TWO, block_size=BLOCK) as group:
        await warm(group, "a", TOKENS)
        await until_held(group, a=6)
        middle = keys_of(group)[3]
        if place == "registry":
            await group.registry.withdraw("a", group.workers["a"].describe()["incarnation"], [middle])
            assert await holders(group) == {"a": 3}
        believed = (await holders(group))["a"]
        if place == "lender":
            await lose(group, "a", middle)

        answer = await group.run_on("b", TOKENS, group.source("a", believed))

        assert believed == (3 if place == "registry" else 6)
        assert answer.tokens[0] == await golden(folder, TOKENS)
        assert (answer.done.reused_tokens, answer.done.computed_prompt_tokens) == (48, 52)
        await group.until_baseline()
        assert group.counter("b", "reuse_failures_total") == (place == "lender")


async def test_a_block_whose_computing_failed_is_never_found(folder: Path) -> None:
    """Case 33, rule 7: blocks 0 to 2 are, and the next request goes on behind them."""
    async with WorkerPair(folder, block_size=BLOCK, faults="engine.prefill_chunk:error*1+3@prefill") as pair:
        with pytest.raises(ServingError, match="the model failed"):
            await pair.ask(TOKENS)
        await pair.until_baseline()
        await until_held(pair, prefill=3)

        again, route = await pair.ask(TOKENS, name="again")

        assert again == await golden(folder, TOKENS)
        assert (route.cached_tokens, route.provenance.prefill_computed_tokens) == (48, 52)
        await until_held(pair, prefill=6, decode=6)
        await pair.until_baseline()


async def test_a_block_that_was_not_read_is_never_found(folder: Path) -> None:
    """Case 33, rules 7 and 25: of a hand-off that failed in block 3, as the policy says, decode holds nothing."""
    plan = "engine.prefill_chunk:delay=0.1@prefill,transfer.read:error*1+3@decode"
    policy = {"on_load_failure": "fail"}
    async with WorkerPair(folder, block_size=BLOCK, faults=plan, handoff=policy) as pair:
        with pytest.raises(TransferError):
            await pair.ask(TOKENS)
        await pair.until_baseline()
        assert "decode" not in await holders(pair)

        again, _ = await pair.ask(TOKENS, name="again")

        assert again == await golden(folder, TOKENS)
        await until_held(pair, prefill=6, decode=6)
        await pair.until_baseline()
