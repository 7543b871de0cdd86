"""Hand-offs as a client sees them at the doors (CASES.md, A); blocks of 16 tokens."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvferry import InvalidRequest
from tests.integration.pair_doors import Doors, open_doors
from tests.integration.process_group import Reference, make_prompt, save_model_with_tokenizer
from tests.integration.worker_pair import WorkerPair

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT = 512
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_with_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(folder: Path) -> AsyncIterator[WorkerPair]:
    async with WorkerPair(folder, num_blocks=64, block_size=16, max_running=8) as pair:
        yield pair


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def doors(pair: WorkerPair) -> AsyncIterator[Doors]:
    async with open_doors(pair) as doors:
        yield doors


def count(pair: WorkerPair, counter: str) -> dict[str, float]:
    return {sample.worker_id: sample.counters[counter] for sample in pair.links.samples()}


async def test_a_prompt_one_token_too_long_is_refused_before_any_worker_hears_of_it(
    pair: WorkerPair, doors: Doors, reference: Reference
) -> None:
    """Case 7."""
    tokens = make_prompt(CONTEXT + 1, 7)
    before = count(pair, "engine_steps_total")

    over_http = await doors.chat(tokens, max_tokens=1)
    with pytest.raises(InvalidRequest, match=str(CONTEXT)):
        await doors.client.generate(tokens, max_tokens=1)

    assert over_http.status_code == 400
    assert str(CONTEXT) in over_http.json()["error"]["message"]
    await pair.until_baseline()
    assert count(pair, "engine_steps_total") == before
    longest = await doors.client.generate(tokens[: CONTEXT - 1], max_tokens=1, temperature=0, ignore_eos=True)
    assert list(longest.token_ids) == reference(tokens[: CONTEXT - 1], 1)


async def test_64_requests_at_once_are_answered_or_refused_soon(
    pair: WorkerPair, doors: Doors, reference: Reference
) -> None:
    """Case 9: 8 run at a time."""
    prompts = [make_prompt(30, 900 + number) for number in range(64)]
    started_s = time.monotonic()

    answers = await asyncio.gather(*(doors.chat(tokens, max_tokens=4) for tokens in prompts))

    assert time.monotonic() - started_s < 30
    assert {answer.status_code for answer in answers} <= {200, 503}
    for tokens, answer in zip(prompts, answers, strict=True):
        if answer.status_code == 200:
            content = answer.json()["choices"][0]["message"]["content"]
            assert content == doors.text(await asyncio.to_thread(reference, tokens, 4))
    await pair.until_baseline()


@pytest.mark.slow
async def test_after_15_seconds_of_silence_the_next_request_is_served(
    pair: WorkerPair, doors: Doors, reference: Reference
) -> None:
    """Case 10: the HTTP door ends connections that were idle for 5 s."""
    for seed, silence_s in ((10, 0.0), (11, 15.0)):
        await asyncio.sleep(silence_s)
        over_http = await doors.chat(make_prompt(60, seed), max_tokens=4)
        over_grpc = await doors.client.generate(
            make_prompt(60, 100 + seed), max_tokens=4, temperature=0, ignore_eos=True
        )

        assert over_http.status_code == 200
        content = over_http.json()["choices"][0]["message"]["content"]
        assert content == doors.text(reference(make_prompt(60, seed), 4))
        assert list(over_grpc.token_ids) == reference(make_prompt(60, 100 + seed), 4)
        assert over_grpc.provenance.blocks_moved == 4
    await pair.until_baseline()


async def test_every_token_after_a_hand_off_has_its_log_probability(
    pair: WorkerPair, doors: Doors, reference: Reference
) -> None:
    """Case 15: token 1 too, which another worker sampled."""
    tokens, before = make_prompt(60, 15), count(pair, "transfer_blocks_total")

    answer = await doors.chat(tokens, max_tokens=8, logprobs=True, top_logprobs=5)

    entries: list[dict[str, Any]] = answer.json()["choices"][0]["logprobs"]["content"]
    assert len(entries) == 8
    known = list(tokens)
    for entry in entries:
        (token,) = doors.tokenizer.encode(entry["token"])
        expected = reference.logprobs(known)[-1]
        assert entry["logprob"] == pytest.approx(float(expected[token]), abs=TOLERANCE)
        assert token == int(expected.argmax())
        assert [other["logprob"] for other in entry["top_logprobs"]] == pytest.approx(
            expected.topk(5).values.tolist(), abs=TOLERANCE
        )
        assert entry["token"] in [other["token"] for other in entry["top_logprobs"]]
        known.append(token)
    await pair.until_baseline()
    assert count(pair, "transfer_blocks_total")["decode"] == before["decode"] + 4


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_an_echo_with_log_probabilities_is_that_of_one_worker(
    pair: WorkerPair, doors: Doors, reference: Reference, max_tokens: int
) -> None:
    """Case 16: token 1 alone needs no decode worker, a second one is handed off."""
    tokens = make_prompt(60, 16 + 100 * max_tokens)

    answer = await doors.client.generate(
        tokens, max_tokens=max_tokens, echo=True, logprobs=1, prompt_logprobs=1, temperature=0, ignore_eos=True
    )

    assert list(answer.token_ids) == reference(tokens, max_tokens)
    assert answer.text == doors.text([*tokens, *answer.token_ids])
    assert answer.provenance.prefill_worker == "prefill"
    assert answer.prompt_logprobs[0] is None
    expected = reference.logprobs([*tokens, *answer.token_ids])
    scored = [*answer.prompt_logprobs[1:], *answer.logprobs]
    assert len(scored) == 59 + max_tokens
    for position, entry in enumerate(scored):
        assert entry is not None
        assert entry.logprob == pytest.approx(float(expected[position, entry.token_id]), abs=TOLERANCE)
        assert entry.top[0].logprob == pytest.approx(float(expected[position].max()), abs=TOLERANCE)
    await pair.until_baseline()


async def test_an_echo_without_any_token_is_refused_and_harms_nobody(
    pair: WorkerPair, doors: Doors, reference: Reference
) -> None:
    """Case 16: max_tokens 0."""
    tokens = make_prompt(60, 160)

    with pytest.raises(InvalidRequest, match="max_tokens"):
        await doors.client.generate(tokens, max_tokens=0, echo=True, prompt_logprobs=1)

    answer = await doors.client.generate(tokens, max_tokens=4, temperature=0, ignore_eos=True)
    assert list(answer.token_ids) == reference(tokens, 4)
    await pair.until_baseline()


async def test_the_usage_counts_whole_cached_blocks(pair: WorkerPair, doors: Doors) -> None:
    """Case 17."""
    tokens, cached = make_prompt(87, 17), []
    for _ in range(2):
        usage = (await doors.chat(tokens, max_tokens=4)).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        # The registry hears of new blocks a moment later.
        await asyncio.sleep(0.2)

    assert cached == [0, 80]
    await pair.until_baseline()


async def test_a_request_id_of_the_clients_own_names_nothing_inside(
    pair: WorkerPair, doors: Doors, reference: Reference
) -> None:
    """Case 22: two at once under the same odd name, each with its own hand-off and answer."""
    name = "a/b:c___#layer"
    prompts, before = [make_prompt(60, seed) for seed in (22, 220)], count(pair, "transfer_blocks_total")

    answers = await asyncio.gather(
        *(doors.chat(tokens, max_tokens=8, headers={"x-request-id": name}) for tokens in prompts)
    )

    for tokens, answer in zip(prompts, answers, strict=True):
        assert (answer.status_code, answer.headers["x-request-id"]) == (200, name)
        assert answer.json()["choices"][0]["message"]["content"] == doors.text(reference(tokens, 8))
    await pair.until_baseline()
    assert count(pair, "transfer_blocks_total")["decode"] == before["decode"] + 8
