"""Answers have OpenAI's shape."""

from typing import Any

from deployments.gateway.openai_answers import make_answer, model_object
from deployments.service import Chunk, Finish, ModelCard, ScoredToken, Summary
from messages.tokens import FinishReason, Provenance, Usage

LENGTH = Finish(reason=FinishReason.LENGTH)
SUMMARY = Summary(
    usage=Usage(prompt_tokens=7, completion_tokens=2, cached_tokens=4),
    provenance=Provenance(),
    first_token_s=0.1,
    total_s=0.2,
)


def chunk(text: str, choice: int = 0, **fields: Any) -> Chunk:
    return Chunk(request_id="r1", text=text, token_ids=(1,), choice=choice, **fields)


def scored(text: str, logprob: float, *top: ScoredToken) -> ScoredToken:
    return ScoredToken(token_id=1, text=text, data=text.encode(), logprob=logprob, top=top)


def test_a_completion_has_the_text_the_reason_and_the_usage() -> None:
    completion: dict[str, Any] = make_answer("r1", "m").completion(
        [chunk("te"), chunk("xt", finish=LENGTH, summary=SUMMARY)]
    )

    assert completion["id"] == "chatcmpl-r1"
    assert completion["object"] == "chat.completion"
    assert completion["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "text", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert completion["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_each_choice_has_its_own_text_and_says_what_stopped_it() -> None:
    by_string = Finish(reason=FinishReason.STOP, stop="x")
    by_token = Finish(reason=FinishReason.STOP, stop=13)

    completion = make_answer("r1", "m", num_choices=2).completion(
        [chunk("a"), chunk("b", 1), chunk("c", 1, finish=by_token), chunk("d", finish=by_string, summary=SUMMARY)]
    )

    assert [choice["message"]["content"] for choice in completion["choices"]] == ["ad", "bc"]
    assert [choice["stop_reason"] for choice in completion["choices"]] == ["x", 13]
    assert {choice["finish_reason"] for choice in completion["choices"]} == {"stop"}


def test_log_probabilities_have_the_bytes_of_parts_of_code_points_and_no_infinity() -> None:
    half = ScoredToken(token_id=5, text="\ufffd", data=b"\xc3", logprob=float("-inf"))
    answer = make_answer("r1", "m", has_logprobs=True)

    (part,) = answer.parts(chunk("", logprobs=(scored("a", -0.5, scored("a", -0.5), half),)))

    assert part["choices"][0]["delta"] == {"content": ""}
    assert part["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "a",
                "logprob": -0.5,
                "bytes": [97],
                "top_logprobs": [
                    {"token": "a", "logprob": -0.5, "bytes": [97]},
                    {"token": "\ufffd", "logprob": -9999.0, "bytes": [0xC3]},
                ],
            }
        ],
        "refusal": None,
    }


def test_a_chunk_with_nothing_to_say_is_not_sent() -> None:
    answer = make_answer("r1", "m")

    assert answer.parts(chunk("")) == []
    assert [part["choices"][0]["finish_reason"] for part in answer.parts(chunk("", finish=LENGTH))] == ["length"]


def test_a_model_says_its_context_length() -> None:
    card = ModelCard(name="m", context_length=8192)

    assert model_object(card, created=5) == {
        "id": "m",
        "object": "model",
        "created": 5,
        "owned_by": "kvferry",
        "context_length": 8192,
    }
