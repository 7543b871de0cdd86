"""The body of a chat request of the OpenAI API, and the extensions that this server takes in it.

A question about a chat request has the same body.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from deployments.gateway.structured_output import parse_response_format, parse_structured_outputs
from deployments.gateway.validation import (
    MAX_INT32,
    MAX_LOGPROBS,
    SAMPLING_FIELDS,
    boolean,
    integer,
    make_spec,
    refuse_unknown,
    role,
    text,
)
from deployments.service import ChatTurn, GenerationSpec
from messages.errors import InvalidRequest
from messages.requests import Grammar

_STRUCTURE = (
    "model",
    "messages",
    "stream",
    "stream_options",
    "max_completion_tokens",
    "top_logprobs",
    "response_format",
    "structured_outputs",
)
# The API's answer has no place for what prompt_logprobs asks for.
_SAMPLING = frozenset(SAMPLING_FIELDS) - {"prompt_logprobs"}
_FIELDS = _SAMPLING | frozenset(_STRUCTURE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A checked request and how its answer is wanted."""

    spec: GenerationSpec
    stream: bool
    include_usage: bool


def parse_chat_request(body: bytes) -> ChatRequest:
    """Read the body of POST /v1/chat/completions.

    Raises:
        InvalidRequest: It is no JSON object, or a field is unknown, has the wrong type or is out of its limits.
    """
    fields = _parse_object(body)
    refuse_unknown(fields, _FIELDS)
    sampling = {name: fields.get(name) for name in _SAMPLING}
    sampling["max_tokens"] = _token_limit(fields)
    sampling["logprobs"] = _num_logprobs(fields)
    stream = _flag(fields.get("stream"), "stream")
    model = fields.get("model")
    return ChatRequest(
        spec=make_spec(
            prompt=_parse_messages(fields.get("messages")),
            model=None if model is None else text(model, "model"),
            sampling=sampling,
            grammar=_grammar(fields),
        ),
        stream=stream,
        include_usage=_parse_include_usage(fields.get("stream_options"), stream=stream),
    )


def parse_explain_request(body: bytes) -> GenerationSpec:
    """Read the body of POST /explain, which is that of a chat request.

    Raises:
        InvalidRequest: As for a chat request; or it asks for a stream, which an explanation is not.
    """
    chat = parse_chat_request(body)
    if chat.stream:
        raise InvalidRequest("stream must be false or left out: an explanation comes whole", param="stream")
    return chat.spec


def _parse_object(body: bytes) -> Mapping[str, object]:
    try:
        fields = json.loads(body.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequest(f"the body is not valid JSON: {reason}", reason="invalid_json") from error
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object", reason="invalid_json")
    return fields


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _token_limit(fields: Mapping[str, object]) -> object:
    old, new = fields.get("max_tokens"), fields.get("max_completion_tokens")
    if new is None:
        return old
    limit = integer(new, "max_completion_tokens", low=1, high=MAX_INT32)
    if old is not None and old != limit:
        message = "max_tokens and max_completion_tokens say different things; send one of them"
        raise InvalidRequest(message, param="max_completion_tokens")
    return limit if old is None else old


def _num_logprobs(fields: Mapping[str, object]) -> int | None:
    wanted = _flag(fields.get("logprobs"), "logprobs")
    top = fields.get("top_logprobs")
    if top is None:
        return 0 if wanted else None
    if not wanted:
        raise InvalidRequest("top_logprobs is only allowed with logprobs: true", param="top_logprobs")
    return integer(top, "top_logprobs", low=0, high=MAX_LOGPROBS)


def _grammar(fields: Mapping[str, object]) -> Grammar | None:
    response_format = parse_response_format(fields.get("response_format"))
    structured = parse_structured_outputs(fields.get("structured_outputs"))
    if response_format is not None and structured is not None:
        message = "response_format and structured_outputs say different things; send one of them"
        raise InvalidRequest(message, param="structured_outputs")
    return structured if response_format is None else response_format


def _parse_include_usage(options: object, *, stream: bool) -> bool:
    if options is None:
        return False
    if not stream:
        raise InvalidRequest("stream_options is only allowed with stream: true", param="stream_options")
    if not isinstance(options, dict):
        raise InvalidRequest("stream_options must be an object", param="stream_options")
    refuse_unknown(options, ("include_usage",), inside="stream_options")
    return _flag(options.get("include_usage"), "stream_options.include_usage")


def _flag(value: object, name: str) -> bool:
    return False if value is None else boolean(value, name)


def _parse_messages(messages: object) -> tuple[ChatTurn, ...]:
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list of at least 1 message", param="messages")
    return tuple(_parse_message(message, f"messages.{index}") for index, message in enumerate(messages))


def _parse_message(message: object, name: str) -> ChatTurn:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{name} must be an object", param=name)
    speaker = role(message.get("role"), f"{name}.role")
    refuse_unknown(
        message, ("role", "content", "tool_call_id") if speaker == "tool" else ("role", "content"), inside=name
    )
    return ChatTurn(
        role=speaker,
        content=_parse_content(message.get("content"), f"{name}.content"),
        tool_call_id=text(message.get("tool_call_id", ""), f"{name}.tool_call_id"),
    )


def _parse_content(content: object, name: str) -> str:
    if not isinstance(content, list):
        return text(content, name)
    if not content:
        raise InvalidRequest(f"{name} must have at least 1 part", param=name)
    return "".join(_parse_part(part, f"{name}.{index}") for index, part in enumerate(content))


def _parse_part(part: object, name: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise InvalidRequest(f"{name} must be a part of type text", param=name)
    refuse_unknown(part, ("type", "text"), inside=name)
    return text(part.get("text"), f"{name}.text")
