"""Every sampling parameter at both doors: choices, log probabilities, ends, limits, refusals, through real clients."""

import json
from typing import Any

import grpc
import openai
import pytest

from deployments.gateway.scripted_service import DEFAULT_MODELS, Script
from kvferry import AsyncClient
from kvferry.v1 import inference_pb2
from messages.requests import Grammar, GrammarKind

MESSAGES: Any = [{"role": "user", "content": "hi"}]
CHAT = {"model": "scripted", "messages": MESSAGES}


def golden(index: int, delta: dict[str, str], **fields: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | fields


def scored(token: str, *top: tuple[str, float]) -> dict[str, Any]:
    entries = [{"token": text, "logprob": logprob, "bytes": list(text.encode())} for text, logprob in top]
    own = {"token": token, "logprob": -0.25, "bytes": list(token.encode()), "top_logprobs": entries}
    return {"content": [own], "refusal": None}


async def test_two_choices_with_log_probabilities_are_these_events_on_the_wire(open_doors: Any) -> None:
    body = CHAT | {
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "stop": "lo",
    }

    async with open_doors(Script(pieces=["Hé", "l", "lo"])) as doors:
        answer = await doors.http.post("/v1/chat/completions", json=body)

    *lines, done = answer.text.strip().split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    first = scored("Hé", ("Hé", -0.25), ("l", -0.5))
    second = scored("l", ("l", -0.25), ("lo", -0.5))
    third = scored("lo", ("lo", -0.25), ("Hé", -0.5))
    role, end = {"role": "assistant", "content": ""}, {"finish_reason": "stop", "stop_reason": "lo"}
    assert done == "data: [DONE]"
    assert [event["choices"] for event in events] == [
        [golden(0, role)],
        [golden(1, role)],
        [golden(0, {"content": "Hé"}, logprobs=first)],
        [golden(1, {"content": "Hé"}, logprobs=first)],
        # "l" may be the beginning of the stop string, so its text waits; its token does not.
        [golden(0, {"content": ""}, logprobs=second)],
        [golden(1, {"content": ""}, logprobs=second)],
        [golden(0, {"content": "l"}, logprobs=third)],
        [golden(0, {}, **end)],
        [golden(1, {"content": "l"}, logprobs=third)],
        [golden(1, {}, **end)],
        [],
    ]
    assert [event["usage"] is None for event in events] == [True] * 10 + [False]
    assert events[-1]["usage"] | {"prompt_tokens_details": {}} == {
        "prompt_tokens": 2,
        "completion_tokens": 6,
        "total_tokens": 8,
        "prompt_tokens_details": {},
    }
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1


async def test_the_openai_client_reads_choices_and_log_probabilities_whole_and_streamed(open_doors: Any) -> None:
    options: dict[str, Any] = {"model": "scripted", "messages": MESSAGES, "n": 2, "logprobs": True, "top_logprobs": 1}

    async with open_doors() as doors:
        whole = await doors.openai.chat.completions.create(**options)
        parts = [part async for part in await doors.openai.chat.completions.create(**options, stream=True)]

    assert [choice.index for choice in whole.choices] == [0, 1]
    for index, choice in enumerate(whole.choices):
        own = [part.choices[0] for part in parts if part.choices[0].index == index]
        assert choice.message.content == "".join(part.delta.content or "" for part in own) == "Hello \u2028world"
        assert [part.finish_reason for part in own if part.finish_reason] == [choice.finish_reason] == ["stop"]
        assert choice.logprobs is not None
        content = choice.logprobs.content or []
        assert "".join(token.token for token in content) == choice.message.content
        assert content == [token for part in own if part.logprobs for token in part.logprobs.content or []]
        assert [len(token.top_logprobs) for token in content] == [1] * 4
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8


async def test_every_parameter_of_the_openai_client_reaches_the_request(open_doors: Any) -> None:
    schema = {"type": "object"}

    async with open_doors() as doors:
        await doors.openai.chat.completions.create(
            model="scripted",
            messages=MESSAGES,
            max_completion_tokens=9,
            temperature=0.5,
            top_p=0.5,
            seed=1,
            presence_penalty=1,
            frequency_penalty=-1,
            logit_bias={"7": -5},
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
            extra_body={
                "top_k": 3,
                "min_p": 0.5,
                "repetition_penalty": 2,
                "min_tokens": 1,
                "stop_token_ids": [300],
                "include_stop_str_in_output": True,
                "allowed_token_ids": [0, 1],
                "bad_words": ["x"],
                "priority": 4,
            },
        )
        (spec,) = doors.service.specs

    assert (spec.max_tokens, spec.temperature, spec.top_p, spec.seed) == (9, 0.5, 0.5, 1)
    assert (spec.presence_penalty, spec.frequency_penalty, spec.repetition_penalty) == (1.0, -1.0, 2.0)
    assert (spec.logit_bias, spec.allowed_token_ids, spec.bad_words) == (((7, -5.0),), (0, 1), ("x",))
    assert (spec.top_k, spec.min_p, spec.min_tokens, spec.stop_token_ids) == (3, 0.5, 1, (300,))
    assert (spec.include_stop, spec.priority) == (True, 4)
    assert spec.grammar == Grammar(kind=GrammarKind.JSON_SCHEMA, source='{"type": "object"}')


ENDS: Any = [
    ({}, "Hello \u2028world", "stop", None),
    ({"stop_token_ids": [2]}, "Hello ", "stop", 2),
    ({"stop_token_ids": [2], "include_stop_str_in_output": True}, "Hello \u2028w", "stop", 2),
    ({"stop": "o w"}, "Hello \u2028world", "stop", None),
    ({"stop": "lo"}, "Hel", "stop", "lo"),
    ({"stop": ["lo"], "include_stop_str_in_output": True}, "Hello", "stop", "lo"),
    ({"stop": "Hel", "min_tokens": 1, "max_tokens": 2}, "Hello ", "length", None),
    ({"ignore_eos": True, "max_tokens": 5}, "Hello \u2028worldHel", "length", None),
]


@pytest.mark.parametrize(("sampling", "text", "reason", "stop"), ENDS)
async def test_the_end_says_what_it_was_at_both_doors(
    open_doors: Any, sampling: dict[str, Any], text: str, reason: str, stop: object
) -> None:
    async with open_doors() as doors:
        over_http = (await doors.http.post("/v1/chat/completions", json=CHAT | sampling)).json()["choices"][0]
        async with AsyncClient(f"127.0.0.1:{doors.listeners.grpc_port}") as client:
            over_grpc = await client.generate("hi", **sampling)

    assert (over_http["message"]["content"], over_http["finish_reason"], over_http["stop_reason"]) == (
        text,
        reason,
        stop,
    )
    assert (over_grpc.text, over_grpc.finish_reason, over_grpc.stop) == (text, reason, stop)


async def test_the_sdk_gets_choices_log_probabilities_and_the_echo(open_doors: Any) -> None:
    async with (
        open_doors() as doors,
        AsyncClient(f"127.0.0.1:{doors.listeners.grpc_port}") as client,
        client.stream("ab", n=2, logprobs=2, prompt_logprobs=0, echo=True) as chunks,
    ):
        seen = [chunk async for chunk in chunks]

    completion = chunks.result
    assert [choice.text for choice in completion.choices] == ["abHello \u2028world"] * 2
    for index, choice in enumerate(completion.choices):
        own = [chunk for chunk in seen if chunk.choice == index]
        # The tokens of the chunks are all there are, those of the last one among them.
        assert choice.token_ids == tuple(token_id for chunk in own for token_id in chunk.token_ids) == (0, 1, 2, 3)
        assert [token.text for token in choice.logprobs] == ["Hel", "lo ", "\u2028w", "orld"]
        assert [len(token.top) for token in choice.logprobs] == [2] * 4
    assert completion.usage.completion_tokens == 8
    first, second = completion.prompt_logprobs
    assert first is None
    assert second is not None
    assert second.text == "b"


async def test_a_completion_of_one_token_past_the_context_is_refused_with_its_numbers(open_doors: Any) -> None:
    async with open_doors(Script(pieces=["x"] * 9)) as doors:
        doors.service._models = [DEFAULT_MODELS[0].__class__(name="scripted", context_length=2048)]
        body = CHAT | {"messages": [{"role": "user", "content": "y" * 2045}]}
        replies = [
            (await doors.http.post("/v1/chat/completions", json=body | {"max_tokens": most})).json()
            for most in (3, 4, None)
        ]

    assert replies[0]["choices"][0]["finish_reason"] == replies[2]["choices"][0]["finish_reason"] == "length"
    assert replies[2]["usage"]["completion_tokens"] == 3
    assert replies[1]["error"]["param"] == "max_tokens"
    assert all(number in replies[1]["error"]["message"] for number in ("2048", "2045", "4"))


REFUSALS: Any = [
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"1000": 1}}, "logit_bias"),
    ({"allowed_token_ids": [1000]}, "allowed_token_ids"),
    ({"stop_token_ids": [1000]}, "stop_token_ids"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"guided_json": {}}, "guided_json"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param"), REFUSALS)
async def test_what_is_out_of_its_limits_is_refused_by_name_and_the_next_request_runs(
    open_doors: Any, fields: dict[str, Any], param: str, *, stream: bool
) -> None:
    async with open_doors() as doors:
        refused = await doors.http.post("/v1/chat/completions", json=CHAT | {"stream": stream} | fields)
        last_added = await doors.http.post("/v1/chat/completions", json=CHAT | {"logit_bias": {"999": 1}})

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert param in refused.json()["error"]["message"]
    assert last_added.status_code == 200


async def test_the_openai_client_raises_a_bad_request_that_names_the_field(open_doors: Any) -> None:
    async with open_doors() as doors:
        with pytest.raises(openai.BadRequestError, match=r"n must be in 1\.\.16") as raised:
            await doors.openai.chat.completions.create(model="scripted", messages=MESSAGES, n=17)

    assert raised.value.param == "n"


@pytest.mark.parametrize(
    ("sampling", "names"),
    [
        ({"n": 17}, "n must be in 1..16"),
        ({"logit_bias": {1000: 1.0}}, "logit_bias: token id 1000 is not in the vocabulary, whose ids are 0..999"),
        ({"min_p": 1.5}, "min_p must be in [0, 1]"),
        ({"grammar": inference_pb2.Grammar(json_schema="{")}, "grammar.json_schema is not valid JSON"),
    ],
)
async def test_the_grpc_door_refuses_by_name_too(open_doors: Any, sampling: dict[str, Any], names: str) -> None:
    request = inference_pb2.GenerateRequest(text="x", sampling=inference_pb2.SamplingParams(**sampling))

    async with open_doors() as doors:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await doors.grpc.Generate(request).read()

    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert names in (raised.value.details() or "")
