"""The body of a chat request is read strictly."""

import json
from dataclasses import fields

import pytest

from deployments.gateway.openai_types import ChatRequest, parse_chat_request, parse_explain_request
from deployments.service import ChatTurn, GenerationSpec
from messages.errors import InvalidRequest
from messages.requests import Grammar, GrammarKind

USER = {"role": "user", "content": "hi"}


def parse(**fields: object) -> ChatRequest:
    return parse_chat_request(json.dumps({"messages": [USER]} | fields).encode())


def refusal(**fields: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        parse(**fields)
    return raised.value


def test_all_known_parameters_reach_the_request() -> None:
    chat = parse(
        model="m",
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=5,
        min_tokens=2,
        n=3,
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        seed=7,
        presence_penalty=1,
        frequency_penalty=-1.5,
        repetition_penalty=1.25,
        logit_bias={"5": -100, "60": 0.5},
        allowed_token_ids=[1, 2, 1],
        bad_words=["one", "two"],
        response_format={"type": "json_object"},
        stop="END",
        stop_token_ids=[13],
        include_stop_str_in_output=True,
        logprobs=True,
        top_logprobs=4,
        priority=-2,
    )

    assert (chat.stream, chat.include_usage) == (True, True)
    assert chat.spec == GenerationSpec(
        prompt=(ChatTurn(role="user", content="hi"),),
        model="m",
        max_tokens=5,
        min_tokens=2,
        n=3,
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        seed=7,
        presence_penalty=1.0,
        frequency_penalty=-1.5,
        repetition_penalty=1.25,
        logit_bias=((5, -100.0), (60, 0.5)),
        allowed_token_ids=(1, 2),
        bad_words=("one", "two"),
        grammar=Grammar(kind=GrammarKind.JSON_OBJECT),
        stop=("END",),
        stop_token_ids=(13,),
        include_stop=True,
        logprobs=4,
        priority=-2,
    )
    # What is no part of this API, has a test of its own, or does not go with the rest.
    elsewhere = {"prompt_logprobs", "echo", "timeout_s", "tenant", "ignore_eos"}
    default = parse().spec
    same = {f.name for f in fields(GenerationSpec) if getattr(chat.spec, f.name) == getattr(default, f.name)}
    assert same - {"prompt"} == elsewhere
    assert parse(ignore_eos=True).spec.ignore_eos


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_log_probabilities_are_a_number_of_alternatives(given: dict[str, object], wanted: int | None) -> None:
    assert parse(**given).spec.logprobs == wanted


SCHEMA = {"type": "object", "properties": {"ä": {"type": "string"}}}


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar(kind=GrammarKind.JSON_OBJECT)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(SCHEMA, ensure_ascii=False)),
        ),
        (
            {"structured_outputs": {"json": SCHEMA}},
            Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(SCHEMA, ensure_ascii=False)),
        ),
        (
            {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}},
            Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(SCHEMA, ensure_ascii=False)),
        ),
        ({"structured_outputs": {"regex": "[ab]+"}}, Grammar(kind=GrammarKind.REGEX, source="[ab]+")),
        (
            {"structured_outputs": {"choice": ["yes", "no"]}, "response_format": {"type": "text"}},
            Grammar(kind=GrammarKind.CHOICE, source='["yes", "no"]'),
        ),
    ],
)
def test_structured_output_is_a_grammar(given: dict[str, object], grammar: Grammar | None) -> None:
    assert parse(**given).spec.grammar == grammar


def test_content_parts_are_joined_as_they_are() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    chat = parse(messages=[{"role": "system", "content": parts}, USER])

    assert chat.spec.prompt[0] == ChatTurn(role="system", content="ab")


def test_null_is_the_same_as_absent() -> None:
    assert parse(max_tokens=None, stop=None, stream=None, stream_options=None, model=None) == parse()


@pytest.mark.parametrize(
    "name", ["user", "tools", "best_of", "echo", "prompt_logprobs", "guided_json", "include_stop", "json_schema", "x"]
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
        ({"messages": [USER, {"role": "developer", "content": "x"}]}, "messages.1.role"),
        ({"messages": [USER | {"tool_call_id": "c1"}]}, "messages.0.tool_call_id"),
        ({"messages": [USER, {"role": "tool", "content": "x", "tool_call_id": 1}]}, "messages.1.tool_call_id"),
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
        ({"n": 0}, "n"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "description": "x"}}},
            "response_format.json_schema.description",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
            "response_format.json_schema.strict",
        ),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": []}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"title": "\ud800"}}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": ["\ud800"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": {"description": "x" * 300_000}}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
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


def test_a_turn_of_a_tool_keeps_the_call_that_it_answers() -> None:
    chat = parse(messages=[USER, {"role": "tool", "content": "12 C", "tool_call_id": "c1"}])

    assert chat.spec.prompt[1] == ChatTurn(role="tool", content="12 C", tool_call_id="c1")


def test_a_question_has_the_body_of_a_chat_request_but_no_stream() -> None:
    body = json.dumps({"messages": [USER], "max_tokens": 5, "stream": False}).encode()

    assert parse_explain_request(body) == parse(max_tokens=5).spec
    with pytest.raises(InvalidRequest, match="stream must be false") as raised:
        parse_explain_request(json.dumps({"messages": [USER], "stream": True}).encode())
    assert raised.value.context["param"] == "stream"
