"""The body of a chat request is read strictly; answers have OpenAI's shape."""

import json
from typing import Any

import pytest

from deployments.gateway.openai_types import ChatRequest, make_answer, model_object, parse_chat_request
from deployments.service import ChatTurn, Finish, ModelCard
from messages.errors import InvalidRequest
from messages.tokens import FinishReason, Provenance, Usage

USER = {"role": "user", "content": "hi"}


def parse(**fields: object) -> ChatRequest:
    return parse_chat_request(json.dumps({"messages": [USER]} | fields).encode())


def refusal(**fields: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        parse(**fields)
    return raised.value


def test_all_known_parameters_reach_the_request() -> None:
    chat = parse(
        model="m", stream=True, stream_options={"include_usage": True}, max_tokens=5, temperature=0, top_p=0.5, top_k=3
    )

    assert (chat.stream, chat.include_usage) == (True, True)
    assert (chat.spec.model, chat.spec.max_tokens, chat.spec.temperature) == ("m", 5, 0.0)
    assert (chat.spec.top_p, chat.spec.top_k) == (0.5, 3)
    assert chat.spec.prompt == (ChatTurn(role="user", content="hi"),)


def test_content_parts_are_joined_as_they_are() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    chat = parse(messages=[{"role": "system", "content": parts}, USER])

    assert chat.spec.prompt[0] == ChatTurn(role="system", content="ab")


def test_null_is_the_same_as_absent() -> None:
    assert parse(max_tokens=None, stop=None, stream=None, stream_options=None, model=None) == parse()


@pytest.mark.parametrize(
    "name", ["n", "user", "logprobs", "tools", "response_format", "presence_penalty", "min_p", "logit_bias"]
)
@pytest.mark.parametrize("value", [None, 1])
def test_any_other_parameter_is_refused_by_name(name: str, value: object) -> None:
    error = refusal(**{name: value})

    assert error.message == f"unsupported parameter: {name}"
    assert error.context["param"] == name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages.0"),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages.1.role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
        ({"messages": [USER | {"name": "bob"}]}, "messages.0.name"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"model": 1}, "model"),
        ({"stream": 0}, "stream"),
        ({"stream": "true"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"chunk": 1}}, "stream_options.chunk"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": True}, "max_completion_tokens"),
        ({"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_a_wrong_field_is_refused_with_its_path(fields: dict[str, object], param: str) -> None:
    error = refusal(**fields)

    assert error.context["param"] == param
    assert param in error.message


def test_max_completion_tokens_is_the_newer_name_of_max_tokens() -> None:
    assert parse(max_completion_tokens=5).spec.max_tokens == 5
    assert parse(max_completion_tokens=5, max_tokens=5).spec.max_tokens == 5


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'"text"',
        b"{",
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"messages": [' + b"[" * 200_000,
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"seed": ' + b"9" * 10_000 + b"}",
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="JSON"):
        parse_chat_request(body)


def test_an_infinite_number_is_refused_by_its_limit() -> None:
    with pytest.raises(InvalidRequest, match=r"temperature must be in \[0, 2\]"):
        parse_chat_request(b'{"temperature": 1e999, "messages": [{"role": "user", "content": "x"}]}')


def finish() -> Finish:
    return Finish(
        reason=FinishReason.LENGTH,
        usage=Usage(prompt_tokens=7, completion_tokens=2, cached_tokens=4),
        provenance=Provenance(),
        first_token_s=0.1,
        total_s=0.2,
    )


def test_a_completion_has_the_text_the_reason_and_the_usage() -> None:
    completion: dict[str, Any] = make_answer("r1", "m").completion("text", finish())

    assert completion["id"] == "chatcmpl-r1"
    assert completion["object"] == "chat.completion"
    assert completion["choices"][0]["message"] == {"role": "assistant", "content": "text", "refusal": None}
    assert completion["choices"][0]["finish_reason"] == "length"
    assert completion["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_a_model_says_its_context_length() -> None:
    card = ModelCard(name="m", context_length=8192)

    assert model_object(card, created=5) == {
        "id": "m",
        "object": "model",
        "created": 5,
        "owned_by": "kvferry",
        "context_length": 8192,
    }
