"""What a gateway's router says of a request before it goes anywhere."""

from dataclasses import replace

import pytest

from cluster.memory_ledger import MemoryLedger
from deployments.router import Router
from deployments.worker_views import prompt_keys
from kv_store.registry.memory import MemoryRegistry
from messages.errors import Unavailable
from messages.requests import GenerationRequest
from telemetry.metrics import GatewayMetrics
from tests.unit.deployments.test_dispatcher import Workers, ask, make_dispatcher

REQUEST: GenerationRequest = ask("r").request


async def make_router(workers: Workers, cached: dict[str, int], ledger: MemoryLedger | None = None) -> Router:
    """Its workers hold so many leading tokens of the request's prompt."""
    registry = MemoryRegistry()
    for link in workers.live():
        record = link.record
        await registry.register(record, lease_s=60.0)
        keys = prompt_keys(REQUEST, record)[: cached.get(record.worker_id, 0) // record.block_size]
        await registry.publish(record.worker_id, record.incarnation, keys)
    dispatcher, _ = make_dispatcher(workers, ledger)
    return Router(workers, registry, dispatcher, GatewayMetrics(workers), 100)  # type: ignore[arg-type]


async def test_an_explanation_counts_what_the_registry_knows_to_be_cached() -> None:
    router = await make_router(Workers(p1="prefill", p2="prefill", d1="decode", d2="decode"), {"d2": 992, "p1": 512})

    explanation = await router.explain(REQUEST)

    matched = {each.worker_id: each.matched_tokens for each in explanation.decode.candidates}
    assert matched == {"p1": 512, "p2": 0, "d1": 0, "d2": 992}
    assert explanation.decode.chosen is not None
    assert explanation.decode.chosen.worker_id == "d2"
    assert (explanation.reason, explanation.prefill) == ("few_tokens", None)


async def test_explaining_reserves_nothing_and_leaves_the_next_choice_as_it_was() -> None:
    workers = Workers(p1="prefill", p2="prefill", d1="decode", d2="decode")
    ledger = MemoryLedger()
    router = await make_router(workers, {"p2": 512, "d1": 512}, ledger)
    before = await router.explain(REQUEST)

    for _ in range(5):
        await router.explain(REQUEST)

    assert await router.explain(REQUEST) == before
    assert ledger.num_open == 0
    sent = await router.send(ask("s", hits={"p2": 512, "d1": 512}))
    assert before.decode.chosen is not None
    assert before.prefill is not None
    assert before.prefill.chosen is not None
    assert (sent.decode, sent.prefill) == (before.decode.chosen.worker_id, before.prefill.chosen.worker_id)


async def test_a_prompt_whose_log_probabilities_are_wanted_is_explained_as_computed_whole() -> None:
    router = await make_router(Workers(p1="prefill", d1="decode"), {"d1": 992, "p1": 992})
    whole = replace(REQUEST, sampling=replace(REQUEST.sampling, prompt_logprobs=0))

    explanation = await router.explain(whole)

    assert {each.remaining_tokens for each in explanation.decode.candidates} == {1000}


@pytest.mark.parametrize("left", [{}, {"p1": "prefill"}, {"d1": "decode"}])
async def test_when_nobody_can_be_chosen_there_is_nothing_to_explain(left: dict[str, str]) -> None:
    router = await make_router(Workers(**left), {})

    with pytest.raises(Unavailable):
        await router.explain(REQUEST)
