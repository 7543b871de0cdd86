"""Prefixes that move between workers in processes of their own, over NIXL and Redis, while lenders are struck."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from deployments.config_kv import ReuseConfig
from tests.integration.process_group import BLOCK, ProcessGroup, Reference, make_prompt, save_model_with_tokenizer

pytestmark = [
    pytest.mark.redis,
    pytest.mark.nixl,
    pytest.mark.timeout(180),
    pytest.mark.asyncio(loop_scope="module"),
]
LENGTH = 100
HELD = (LENGTH - 1) // BLOCK * BLOCK


class UnifiedPair(ProcessGroup):
    """Two unified workers; prefixes move whenever one holds more."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        super().__init__(folder, scratch, {"u1": "unified", "u2": "unified"}, num_blocks=256)
        self._settings["reuse"] = ReuseConfig(min_tokens=1, overhead_ms=0.0, margin=0.0)

    async def ask(self, prompt: list[int]) -> tuple[list[int], str, int]:
        """Tokens, who computed them, and how many prompt tokens were found here or elsewhere."""
        result = await self.client.generate(prompt, max_tokens=8, temperature=0, ignore_eos=True)
        provenance = result.provenance
        assert (provenance.reused_tokens > 0) == bool(provenance.reused_from)
        return list(result.token_ids), provenance.decode_worker, result.usage.cached_tokens

    async def busy(self, worker_id: str, prompt: list[int]) -> AsyncExitStack:
        """Let the holder of a prompt work on it, so that the other worker is chosen until the stack is closed."""
        stack = AsyncExitStack()
        stream = self.client.stream(prompt, max_tokens=350, temperature=0, ignore_eos=True)
        chunks = await stack.enter_async_context(stream)
        await anext(aiter(chunks))
        await self.until(lambda: self.sample(worker_id).running == 1)
        return stack

    def counter(self, worker_id: str, name: str) -> float:
        return self.sample(worker_id).counters.get(name, 0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_with_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole_pair(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[UnifiedPair]:
    async with UnifiedPair(folder, tmp_path_factory.mktemp("pair")) as pair:
        yield pair


@pytest_asyncio.fixture(loop_scope="module")
async def pair(whole_pair: UnifiedPair) -> AsyncIterator[UnifiedPair]:
    await whole_pair.mend()
    await whole_pair.until_baseline()
    yield whole_pair


async def test_a_prefix_moves_over_the_real_transport(pair: UnifiedPair, reference: Reference) -> None:
    """Case 4 and rule 5: what another process holds is read, not computed."""
    prompt = make_prompt(LENGTH, 1)
    first, holder, cached = await pair.ask(prompt)
    (other,) = {"u1", "u2"} - {holder}
    await asyncio.sleep(0.3)
    async with await pair.busy(holder, prompt):
        again, worker, reused = await pair.ask(prompt)

    assert first == again == reference(prompt, 8)
    assert (worker, cached, reused) == (other, 0, HELD)
    await pair.until_baseline()
    assert pair.counter(other, "prompt_tokens_remote_cache_total") == HELD
    assert pair.counter(holder, "lends_total") == 1


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lender_that_is_struck_during_the_read_costs_a_recompute(
    pair: UnifiedPair, reference: Reference, blow: signal.Signals
) -> None:
    """Rules 1 and 25: no wrong token, no hang, nothing left."""
    prompt = make_prompt(LENGTH, 2 + int(blow))
    _, holder, _ = await pair.ask(prompt)
    (other,) = {"u1", "u2"} - {holder}
    await asyncio.sleep(0.3)
    await pair.inject(other, "transfer.read:delay=0.5")
    async with AsyncExitStack() as stack:
        stack.push_async_exit(await pair.busy(holder, prompt))
        asking = asyncio.create_task(pair.ask(prompt))
        await pair.until(lambda: pair.sample(holder).handoffs == 1)
        pair.workers[holder].send_signal(blow)
        again, worker, _ = await asyncio.wait_for(asking, 20)
        # The holder's own requests are lost with it.
        stack.pop_all()

    assert again == reference(prompt, 8)
    assert worker == other
    await pair.mend()
    await pair.until_baseline(20.0)
    assert (await pair.ask(prompt))[0] == again
