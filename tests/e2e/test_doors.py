"""The doors in front of the real system: the openai client unmodified, gRPC health, the SDK, refusals by name."""

import json
from typing import Any

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deployments.local_stack import LocalStack
from kvferry import AsyncClient, Client, InvalidRequest
from tests.e2e.system import wait_for_baseline

pytestmark = [pytest.mark.ray, pytest.mark.redis, pytest.mark.nixl, pytest.mark.timeout(300)]

QUESTION: Any = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]


@pytest.fixture
def client(disaggregated: LocalStack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{disaggregated.http_url}/v1", api_key="none", max_retries=0)


def test_the_openai_client_gets_a_true_answer_whole_and_streamed(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id

    whole = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=20, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=QUESTION,
            max_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in (whole.choices[0].message.content or "")
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_stop_strings_and_limits_end_the_text(client: openai.OpenAI) -> None:
    count: Any = [{"role": "user", "content": "Count from one to ten in words."}]
    model = client.models.list().data[0].id

    short = client.chat.completions.create(model=model, messages=count, max_tokens=3, temperature=0)
    free = client.chat.completions.create(model=model, messages=count, max_tokens=40, temperature=0)
    text = free.choices[0].message.content or ""
    stop = text[len(text) // 2 :][:4]
    cut = client.chat.completions.create(model=model, messages=count, max_tokens=40, temperature=0, stop=[stop])

    assert short.choices[0].finish_reason == "length"
    assert short.usage is not None
    assert short.usage.completion_tokens == 3
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_choices_with_log_probabilities_are_whole_after_the_hand_off(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id

    answer = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        max_tokens=8,
        temperature=0,
        n=2,
        logprobs=True,
        top_logprobs=5,
        extra_body={"ignore_eos": True},
    )

    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert len({choice.message.content for choice in answer.choices}) == 1
    for choice in answer.choices:
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        content = choice.logprobs.content or []
        assert len(content) == 8
        # Greedy: the token is the likeliest one, also token 1, which another worker sampled.
        assert all(token.token == token.top_logprobs[0].token for token in content)
        assert all(token.logprob == token.top_logprobs[0].logprob < 0 for token in content)
        assert all(len(token.top_logprobs) == 5 for token in content)


def test_an_echo_and_the_prompts_log_probabilities_are_the_same_when_the_prompt_is_cached(
    disaggregated: LocalStack,
) -> None:
    text = "The ferry leaves the harbour at noon and comes back at night. " * 6

    with Client(disaggregated.grpc_address) as client:
        first, second = (
            client.generate(text, echo=True, prompt_logprobs=1, logprobs=0, max_tokens=2, temperature=0)
            for _ in range(2)
        )

    assert first.text.startswith(text)
    assert first.text == second.text
    for completion in (first, second):
        assert len(completion.prompt_logprobs) == completion.usage.prompt_tokens
        assert completion.prompt_logprobs[0] is None
        assert "".join(token.text for token in completion.prompt_logprobs[1:] if token) in text
        assert len(completion.logprobs) == 2
    for one, other in zip(first.prompt_logprobs[1:], second.prompt_logprobs[1:], strict=True):
        assert one is not None
        assert other is not None
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


def test_the_end_says_whether_it_was_the_models_own_a_token_or_a_string(disaggregated: LocalStack) -> None:
    def end(**sampling: object) -> tuple[str, object]:
        body = {"messages": QUESTION, "temperature": 0, "max_tokens": 24} | sampling
        answer = httpx.post(f"{disaggregated.http_url}/v1/chat/completions", json=body, timeout=60).json()
        return answer["choices"][0]["finish_reason"], answer["choices"][0]["stop_reason"]

    with Client(disaggregated.grpc_address) as client:
        token_id = client.chat(QUESTION, temperature=0, max_tokens=4).token_ids[1]

    assert end() == ("stop", None)
    assert end(stop_token_ids=[token_id]) == ("stop", token_id)
    assert end(stop="aris") == ("stop", "aris")
    assert end(ignore_eos=True) == ("length", None)
    assert end(allowed_token_ids=[token_id], ignore_eos=True, max_tokens=5) == ("length", None)


@pytest.mark.parametrize(
    ("field", "value"),
    [("user", "bob"), ("logit_bias", {"10000000": 1}), ("temperature", 3), ("max_tokens", 0), ("n", 17)],
)
def test_what_is_not_honoured_is_refused_by_name(disaggregated: LocalStack, field: str, value: object) -> None:
    body = {"messages": QUESTION, field: value}

    answer = httpx.post(f"{disaggregated.http_url}/v1/chat/completions", json=body, timeout=30)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert field in answer.json()["error"]["message"]


async def test_a_prompt_beyond_the_context_is_refused_and_leaves_nothing(disaggregated: LocalStack) -> None:
    async with AsyncClient(disaggregated.grpc_address) as client:
        (model,) = await client.models()
        with pytest.raises(InvalidRequest, match=str(model.context_length)):
            await client.generate([100] * (model.context_length + 1), max_tokens=1)

    wait_for_baseline(disaggregated, 2.0)


async def test_health_is_served_over_grpc_and_http(disaggregated: LocalStack) -> None:
    async with grpc.aio.insecure_channel(disaggregated.grpc_address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="kvferry.v1.Inference")
        )

    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    async with httpx.AsyncClient(base_url=disaggregated.http_url) as http:
        assert [(await http.get(path)).status_code for path in ("/health", "/ready")] == [200, 200]


def test_structured_output_is_valid_json_of_the_schema(disaggregated: LocalStack) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "rank": {"type": "integer", "maximum": 9}},
        "required": ["city", "rank"],
        "additionalProperties": False,
    }
    body = {
        "messages": [{"role": "user", "content": "Name a big city and its rank as JSON."}],
        "max_tokens": 60,
        "temperature": 1.0,
        "n": 2,
        "seed": 5,
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
    }

    answer = httpx.post(f"{disaggregated.http_url}/v1/chat/completions", json=body, timeout=120)

    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        assert choice["finish_reason"] == "stop"
        value = json.loads(choice["message"]["content"])
        assert set(value) == {"city", "rank"}
        assert isinstance(value["rank"], int)
