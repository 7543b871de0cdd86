"""Every field of the public contract reaches the request, and every part of a chunk the wire."""

from typing import Any

import pytest

from deployments.gateway.grpc_types import chunk_message, spec_of_chat, spec_of_explain, spec_of_generate
from deployments.service import Chunk, Finish, GenerationSpec, ScoredToken, Summary
from kvferry.v1 import inference_pb2 as v1
from messages.errors import InvalidRequest
from messages.requests import Grammar, GrammarKind
from messages.tokens import FinishReason, Provenance, Usage


def spec(**sampling: Any) -> GenerationSpec:
    return spec_of_generate(v1.GenerateRequest(text="hi", sampling=v1.SamplingParams(**sampling)), None)


def test_every_sampling_parameter_reaches_the_request() -> None:
    sampling = v1.SamplingParams(
        max_tokens=5,
        min_tokens=2,
        n=3,
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        min_p=0.125,
        seed=7,
        presence_penalty=1.0,
        frequency_penalty=-1.5,
        repetition_penalty=1.25,
        logit_bias={5: -100.0},
        allowed_token_ids=v1.TokenIds(ids=[1, 2]),
        bad_words=["one"],
        grammar=v1.Grammar(json_object=v1.JsonObject()),
        stop=["END"],
        stop_token_ids=[13],
        include_stop_str_in_output=True,
        ignore_eos=False,
        logprobs=0,
        prompt_logprobs=4,
        priority=-2,
    )
    assert {field.name for field, _ in sampling.ListFields()} == set(sampling.DESCRIPTOR.fields_by_name)

    made = spec_of_generate(v1.GenerateRequest(text="hi", model="m", echo=True, sampling=sampling), 2.5)

    assert made == GenerationSpec(
        prompt="hi",
        model="m",
        max_tokens=5,
        min_tokens=2,
        n=3,
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        min_p=0.125,
        seed=7,
        presence_penalty=1.0,
        frequency_penalty=-1.5,
        repetition_penalty=1.25,
        logit_bias=((5, -100.0),),
        allowed_token_ids=(1, 2),
        bad_words=("one",),
        grammar=Grammar(kind=GrammarKind.JSON_OBJECT),
        stop=("END",),
        stop_token_ids=(13,),
        include_stop=True,
        logprobs=0,
        prompt_logprobs=4,
        echo=True,
        priority=-2,
        timeout_s=2.5,
    )
    assert spec(ignore_eos=True).ignore_eos


def test_a_field_left_out_takes_its_default_in_both_calls() -> None:
    chat = v1.ChatRequest(messages=[v1.ChatMessage(role="user", content="hi")])

    assert spec() == GenerationSpec(prompt="hi")
    assert spec_of_chat(chat, None) == GenerationSpec(prompt=spec_of_chat(chat, None).prompt)


@pytest.mark.parametrize(
    ("grammar", "wanted"),
    [
        (
            v1.Grammar(json_schema='{"type": "object"}'),
            Grammar(kind=GrammarKind.JSON_SCHEMA, source='{"type": "object"}'),
        ),
        (v1.Grammar(regex="a+"), Grammar(kind=GrammarKind.REGEX, source="a+")),
        (v1.Grammar(choice=v1.Texts(texts=["a", "b"])), Grammar(kind=GrammarKind.CHOICE, source='["a", "b"]')),
    ],
)
def test_a_grammar_is_what_the_output_must_match(grammar: v1.Grammar, wanted: Grammar) -> None:
    assert spec(grammar=grammar).grammar == wanted


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias"),
        ({"logit_bias": {2**32 - 1: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": v1.TokenIds()}, "allowed_token_ids"),
        ({"stop_token_ids": range(65)}, "stop_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"min_tokens": 2, "max_tokens": 1}, "min_tokens"),
        ({"grammar": v1.Grammar()}, "grammar"),
        ({"grammar": v1.Grammar(json_schema="{")}, "grammar.json_schema"),
        ({"grammar": v1.Grammar(json_schema="5")}, "grammar.json_schema"),
        ({"grammar": v1.Grammar(regex="")}, "grammar.regex"),
        ({"grammar": v1.Grammar(choice=v1.Texts())}, "grammar.choice"),
        ({"grammar": v1.Grammar(regex="a"), "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_a_value_out_of_its_limits_is_refused_by_name(sampling: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        spec(**sampling)

    assert raised.value.context["param"] == param
    assert param in raised.value.message


def test_a_field_of_a_newer_contract_is_refused_also_inside_a_grammar() -> None:
    grammar = v1.Grammar.FromString(b"\x12\x03\x98\x06\x01")  # json_object with field 99

    with pytest.raises(InvalidRequest, match=r"field number 99 of kvferry\.v1\.JsonObject"):
        spec(grammar=grammar)


def test_a_chunk_is_whole_on_the_wire() -> None:
    other = ScoredToken(token_id=4, text="b", data=b"b", logprob=-2.0)
    token = ScoredToken(token_id=3, text="\ufffd", data=b"\xc3", logprob=-0.5, top=(other,))
    summary = Summary(
        usage=Usage(prompt_tokens=1, completion_tokens=2, cached_tokens=0),
        provenance=Provenance(prefill_worker="p", decode_worker="d"),
        first_token_s=0.25,
        total_s=0.5,
    )

    message = chunk_message(
        Chunk(
            request_id="r",
            choice=1,
            text="a",
            token_ids=(3,),
            logprobs=(token,),
            prompt_logprobs=(None, token),
            finish=Finish(reason=FinishReason.STOP),
            summary=summary,
        )
    )

    assert (message.choice, message.text, list(message.token_ids)) == (1, "a", [3])
    assert message.logprobs[0].text_bytes == b"\xc3"
    assert [entry.text for entry in message.logprobs[0].top] == ["b"]
    assert [entry.HasField("logprob") for entry in message.prompt_logprobs] == [False, True]
    assert message.finish.WhichOneof("stop") is None
    assert message.summary.usage.completion_tokens == 2
    assert message.summary.provenance.decode_worker == "d"
    assert message.summary.timings.total_seconds == 0.5


@pytest.mark.parametrize(
    ("stop", "field", "value"), [("x", "stop_string", "x"), (13, "stop_token_id", 13), (0, "stop_token_id", 0)]
)
def test_a_finish_names_the_string_or_the_token(stop: str | int, field: str, value: object) -> None:
    finish = Finish(reason=FinishReason.STOP, stop=stop)

    message = chunk_message(Chunk(request_id="r", text="", token_ids=(), finish=finish)).finish

    assert message.WhichOneof("stop") == field
    assert getattr(message, field) == value


def test_a_question_is_read_as_the_request_that_it_is_about() -> None:
    sampling = v1.SamplingParams(max_tokens=5)
    generate = v1.GenerateRequest(text="hi", model="m", echo=True, sampling=sampling)
    chat = v1.ChatRequest(messages=[v1.ChatMessage(role="user", content="hi")], sampling=sampling)

    assert spec_of_explain(v1.ExplainRequest(generate=generate), 2.5) == spec_of_generate(generate, 2.5)
    assert spec_of_explain(v1.ExplainRequest(chat=chat), None) == spec_of_chat(chat, None)


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (v1.ExplainRequest(), "request"),
        (v1.ExplainRequest(generate=v1.GenerateRequest()), "prompt"),
        (v1.ExplainRequest(chat=v1.ChatRequest()), "messages"),
        # Field 99, a varint; in the question and inside its `chat` (field 2).
        (v1.ExplainRequest.FromString(b"\x98\x06\x01"), "kvferry.v1.ExplainRequest:99"),
        (v1.ExplainRequest.FromString(b"\x12\x03\x98\x06\x01"), "kvferry.v1.ChatRequest:99"),
    ],
)
def test_a_question_about_no_request_or_a_wrong_one_is_refused_by_name(request_: v1.ExplainRequest, param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        spec_of_explain(request_, None)

    assert raised.value.context["param"] == param
