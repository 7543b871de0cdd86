"""The doors in front of the real system: the openai client unmodified, gRPC health, the SDK, refusals by name."""

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deployments.local_stack import LocalStack
from kvferry import AsyncClient, InvalidRequest
from tests.e2e.system import wait_for_baseline

pytestmark = [pytest.mark.ray, pytest.mark.redis, pytest.mark.nixl, pytest.mark.timeout(300)]

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]


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
    count = [{"role": "user", "content": "Count from one to ten in words."}]
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


@pytest.mark.parametrize(
    ("field", "value"), [("n", 2), ("logit_bias", {"1": 1}), ("temperature", 3), ("max_tokens", 0), ("top_k", -1)]
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
