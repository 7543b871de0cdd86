"""`ClearCache` on running workers: their caches are empty, nobody sees their claims, and they go on as before."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deployments.worker.control import clear_cache
from messages.errors import PeerUnreachable
from tests.integration.worker_pair import WorkerPair, save_tiny_model

PROMPT = [index % 90 + 3 for index in range(70)]


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[WorkerPair]:
    async with WorkerPair(save_tiny_model(tmp_path)) as pair:
        yield pair


def num_cached(pair: WorkerPair) -> int:
    return sum(group.cached for sample in pair.links.samples() for group in sample.groups)


async def test_a_cleared_worker_holds_nothing_and_computes_again(pair: WorkerPair) -> None:
    """Rule 11: nobody is sent to blocks that are gone, whatever it takes to say so."""
    first, _ = await pair.ask(PROMPT)
    await pair.until_baseline()
    await pair.until(lambda: bool(pair.registry._holders))
    held = num_cached(pair)

    cleared = [await clear_cache(worker.address, worker.describe()["incarnation"]) for worker in pair.workers.values()]

    await pair.until(lambda: num_cached(pair) == 0)
    await pair.until(lambda: _is_invisible(pair))
    again, route = await pair.ask(PROMPT, name="again")
    assert sum(cleared) == held > 0
    assert again == first
    assert route.cached_tokens == 0
    await pair.until_baseline()


def _is_invisible(pair: WorkerPair) -> bool:
    lives = {name: life.record.generation for name, life in pair.registry._lives.items()}
    return not any(
        holding.generation == lives[worker_id]
        for holders in pair.registry._holders.values()
        for worker_id, holding in holders.items()
    )


async def test_another_life_is_not_cleared(pair: WorkerPair) -> None:
    await pair.ask(PROMPT)
    await pair.until_baseline()
    held = num_cached(pair)

    with pytest.raises(PeerUnreachable):
        await clear_cache(pair.workers["prefill"].address, "another-life")

    assert num_cached(pair) == held > 0
