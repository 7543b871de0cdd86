"""Explanations: typed, of prompts and of conversations, with and without an event loop."""

import pytest

from kvferry import AsyncClient, Client, DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from kvferry.explanations import explanation_of
from kvferry.testing import Answer, FakeServer
from kvferry.v1 import inference_pb2 as v1

LONG = " ".join(["word"] * 100)


async def test_a_long_prompt_is_explained_with_both_stages() -> None:
    async with FakeServer() as server, AsyncClient(server.target) as client:
        explanation = await client.explain(LONG)

    assert explanation.prompt_tokens == 100
    assert (explanation.decode_worker, explanation.prefill_worker) == ("fake-decode", "fake-prefill")
    assert explanation.reason == "sooner_there"
    assert explanation.local_ms is not None
    assert explanation.remote_ms is not None
    assert explanation.remote_ms < explanation.local_ms
    assert explanation.prefill is not None
    for stage in (explanation.decode, explanation.prefill):
        (candidate,) = stage.candidates
        assert stage.policy == "predicted_latency"
        assert (candidate.rank, candidate.is_allowed, candidate.remaining_tokens) == (0, True, 100)
        assert sum(candidate.parts.values()) == pytest.approx(candidate.cost)


def test_a_short_one_has_no_prefill_stage_and_no_predictions() -> None:
    with FakeServer() as server, Client(server.target) as client:
        explanation = client.explain("a b c")

    assert (explanation.reason, explanation.prefill_worker, explanation.prefill) == ("few_tokens", None, None)
    assert (explanation.local_ms, explanation.remote_ms) == (None, None)


async def test_what_is_asked_about_is_what_generate_and_chat_would_send() -> None:
    turns = [{"role": "user", "content": "Hello there"}]

    async with FakeServer() as server, AsyncClient(server.target) as client:
        await client.generate("x", model="m", echo=True, max_tokens=7)
        await client.chat(turns, model="m", stop="END")
        await client.explain("x", model="m", echo=True, max_tokens=7)
        await client.explain_chat(turns, model="m", stop="END")

    generate, chat, *asked = server.requests
    assert isinstance(generate, v1.GenerateRequest)
    assert isinstance(chat, v1.ChatRequest)
    assert asked == [v1.ExplainRequest(generate=generate), v1.ExplainRequest(chat=chat)]


def test_the_sync_client_explains_a_conversation() -> None:
    with FakeServer() as server, Client(server.target) as client:
        explanation = client.explain_chat([{"role": "user", "content": LONG}])

    assert explanation.prefill_worker == "fake-prefill"


async def test_a_failure_is_its_typed_error() -> None:
    answers = (Answer(error=Overloaded("busy")), Answer(held=True))

    async with FakeServer(*answers) as server, AsyncClient(server.target) as client:
        with pytest.raises(Overloaded, match="busy"):
            await client.explain("x")
        with pytest.raises(DeadlineExceeded):
            await client.explain("x", timeout_s=0.2)
        with pytest.raises(InvalidRequest):
            await client.explain([-1])


def test_nobody_listening_is_unavailable() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(Unavailable):
        client.explain("x")


def test_a_worker_that_was_not_ranked_has_no_rank_and_a_newer_reason_is_unknown() -> None:
    excluded = v1.CandidateScore(worker="w", pool="p", cost=2.5, parts=[v1.CostPart(name="a_ms", value=2.5)])
    message = v1.Explanation(decode_worker="d", decode=v1.StageExplanation(policy="new", candidates=[excluded]))
    message.reason = 99  # type: ignore[assignment]  # a number of a later version

    explanation = explanation_of(message)

    (candidate,) = explanation.decode.candidates
    assert (candidate.rank, candidate.is_allowed, dict(candidate.parts)) == (None, False, {"a_ms": 2.5})
    assert explanation.reason == "unknown"
