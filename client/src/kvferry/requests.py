"""From the caller's words to the messages of the public contract; what the contract cannot carry is refused here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from kvferry.errors import InvalidRequest
from kvferry.v1 import inference_pb2 as v1

if TYPE_CHECKING:
    from typing_extensions import Unpack

Prompt = str | Sequence[int]
"""Text, or the token ids of the served model's own tokenizer."""
Messages = Sequence[Mapping[str, str]]
"""Turns of a conversation, each with `role` (system, user, assistant or tool) and `content`; a tool's may have
`tool_call_id`."""

_TURN_FIELDS = {"role", "content"}
_GRAMMARS = ("json_schema", "json_object", "regex", "choice")


class Sampling(TypedDict, total=False):
    """How tokens are chosen and when generation ends; None or left out is the server's default."""

    max_tokens: int | None
    """Most tokens to generate for each choice, >= 1. Default: what the context still holds."""
    min_tokens: int | None
    """The first so many tokens neither are an end or stop token nor complete a stop string."""
    n: int | None
    """Choices: so many texts for one prompt, which is computed once; 1 to 16."""
    temperature: float | None
    """0 is greedy; 0 to 2. Default 1."""
    top_p: float | None
    """Nucleus sampling, in (0, 1]. Default 1."""
    top_k: int | None
    """Sample among the k most likely tokens; 0 (default) means all."""
    min_p: float | None
    """Drop tokens less likely than this share of the most likely one, in [0, 1]."""
    seed: int | None
    """Makes sampling repeatable."""
    presence_penalty: float | None
    """Taken off the logit of every token that was generated, in [-2, 2]."""
    frequency_penalty: float | None
    """Taken off once per time that a token was generated, in [-2, 2]."""
    repetition_penalty: float | None
    """Divides positive and multiplies negative logits of tokens in prompt or output, in (0, 10]; 1 is off."""
    logit_bias: Mapping[int, float] | None
    """Added to the logits of these token ids, -100 to 100."""
    allowed_token_ids: Sequence[int] | None
    """Only these tokens may be generated."""
    bad_words: Sequence[str] | None
    """Words that must not be generated, at the start of the text or after a space."""
    stop: str | Sequence[str] | None
    """Strings that end the text; not part of it."""
    stop_token_ids: Sequence[int] | None
    """Tokens that end the text; not part of it, but of `token_ids`."""
    include_stop_str_in_output: bool | None
    """Leave the stop string, or the text of the stop token, in the text."""
    ignore_eos: bool | None
    """The model's own end tokens end nothing."""
    logprobs: int | None
    """Log probability of every token and of so many most likely ones at its place, 0 to 20. Default: none at all."""
    prompt_logprobs: int | None
    """The same of the prompt's tokens. Such a prompt is computed whole, whatever is cached."""
    priority: int | None
    """Lower goes first."""
    json_schema: Mapping[str, Any] | str | None
    """The output is JSON that this schema describes. At most one of this and the next three can be given."""
    json_object: bool | None
    """The output is a JSON object."""
    regex: str | None
    """The whole output matches this regular expression."""
    choice: Sequence[str] | None
    """The output is one of these texts."""


def make_sampling(**given: Unpack[Sampling]) -> v1.SamplingParams:
    """Build the message; the server checks the limits.

    Raises:
        InvalidRequest: A number does not fit its field, or two grammars are given.
        TypeError: An argument has the wrong type or an unknown name.
    """
    unknown = sorted(given.keys() - Sampling.__optional_keys__)
    if unknown:
        raise TypeError(f"unknown sampling parameter: {', '.join(unknown)}")
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    grammars = {name: fields.pop(name) for name in _GRAMMARS if name in fields}
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    try:
        if "allowed_token_ids" in fields:
            fields["allowed_token_ids"] = v1.TokenIds(ids=fields["allowed_token_ids"])
        return v1.SamplingParams(**fields, grammar=_make_grammar(grammars))
    except ValueError as error:
        raise InvalidRequest(f"a sampling parameter is out of range: {error}") from error


def _make_grammar(given: dict[str, Any]) -> v1.Grammar | None:
    if given.get("json_object") is False:
        del given["json_object"]
    if len(given) > 1:
        raise InvalidRequest(f"{' and '.join(given)} say different things about the output; give one of them")
    for kind, wanted in given.items():
        if kind == "json_schema":
            return v1.Grammar(json_schema=wanted if isinstance(wanted, str) else json.dumps(wanted))
        if kind == "json_object":
            return v1.Grammar(json_object=v1.JsonObject())
        if kind == "regex":
            return v1.Grammar(regex=wanted)
        return v1.Grammar(choice=v1.Texts(texts=wanted))
    return None


def make_generate_request(
    prompt: Prompt, model: str | None, sampling: v1.SamplingParams, *, echo: bool = False
) -> v1.GenerateRequest:
    """Build the message of one prompt.

    Raises:
        InvalidRequest: A token id is negative or does not fit 32 bits.
    """
    request = v1.GenerateRequest(model=model or "", sampling=sampling, echo=echo)
    if isinstance(prompt, str):
        request.text = prompt
        return request
    try:
        request.token_ids.CopyFrom(v1.TokenIds(ids=prompt))
    except ValueError as error:
        raise InvalidRequest(f"prompt: not a token id: {error}") from error
    return request


def make_chat_request(messages: Messages, model: str | None, sampling: v1.SamplingParams) -> v1.ChatRequest:
    """Build the message of one conversation.

    Raises:
        InvalidRequest: A turn lacks `role` or `content`, or has a field that the contract does not know.
    """
    for position, turn in enumerate(messages):
        if set(turn) - {"tool_call_id"} != _TURN_FIELDS:
            raise InvalidRequest(f"messages[{position}]: needs role and content and nothing else, has {sorted(turn)}")
    turns = [v1.ChatMessage(**turn) for turn in messages]
    return v1.ChatRequest(model=model or "", messages=turns, sampling=sampling)
