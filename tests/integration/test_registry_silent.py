"""A whole system whose registry answers nothing: it serves on, says so, and heals by itself."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from telemetry.metrics import WorkerCollector, WorkerCounter, WorkerGauge
from tests.integration.worker_pair import WorkerPair, save_tiny_model

PROMPT = [index % 90 + 3 for index in range(70)]


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[WorkerPair]:
    async with WorkerPair(save_tiny_model(tmp_path)) as pair:
        yield pair


def value(pair: WorkerPair, worker_id: str, name: WorkerCounter | WorkerGauge) -> float:
    return pair.sample(worker_id).counters[name]


async def test_requests_are_answered_without_a_registry(pair: WorkerPair) -> None:
    """Rule 5, rule 9: "unavailable" is unknown, so workers stay and prompts are placed by load."""
    golden, _ = await pair.ask(PROMPT)
    pair.registry.is_silent = True
    await pair.until(lambda: value(pair, "decode", WorkerGauge.REGISTRY_DEGRADED) == 1.0)

    blind = [(await pair.ask(PROMPT, name=f"blind-{number}"))[0] for number in range(3)]
    other, _ = await pair.ask(PROMPT[::-1], name="other")

    assert blind == [golden] * 3
    assert other
    await pair.until_baseline()


async def test_what_was_cached_meanwhile_is_known_when_the_registry_is_back(pair: WorkerPair) -> None:
    """Rules 5 and 10."""
    pair.registry.is_silent = True
    golden, _ = await pair.ask(PROMPT)
    await pair.until(lambda: value(pair, "prefill", WorkerGauge.PUBLISH_QUEUE_DEPTH) > 0)

    pair.registry.is_silent = False
    await pair.until(lambda: value(pair, "prefill", WorkerGauge.PUBLISH_QUEUE_DEPTH) == 0)
    again, route = await pair.ask(PROMPT, name="again")

    assert again == golden
    assert route.cached_tokens > 0
    assert value(pair, "prefill", WorkerGauge.REGISTRY_DEGRADED) == 0.0


async def test_a_registry_that_forgot_everything_is_filled_again_while_requests_run(pair: WorkerPair) -> None:
    """Case 31: no request fails, and the resync is counted."""
    golden, _ = await pair.ask(PROMPT)
    await pair.until(lambda: any("prefill" in holders for holders in pair.registry._holders.values()))

    pair.registry.forget()
    answers = [(await pair.ask(PROMPT, name=f"r-{number}"))[0] for number in range(3)]

    await pair.until(lambda: bool(pair.registry._holders))
    await pair.until(lambda: value(pair, "prefill", WorkerCounter.REGISTRY_RESYNCS) >= 1)
    assert answers == [golden] * 3
    assert value(pair, "prefill", WorkerCounter.REGISTRY_EPOCH_CHANGES) == 1


async def test_the_page_shows_the_registry_as_each_worker_sees_it(pair: WorkerPair) -> None:
    pair.registry.is_silent = True
    await pair.until(lambda: value(pair, "decode", WorkerGauge.REGISTRY_DEGRADED) == 1.0)
    page = CollectorRegistry()
    page.register(WorkerCollector(pair.links))

    text = generate_latest(page).decode()

    assert 'kvferry_worker_registry_degraded{pool="decode",role="decode",worker="decode"} 1.0' in text
    assert "kvferry_worker_publish_queue_depth" in text
    assert "kvferry_registry_event_seq_gaps_total" in text
