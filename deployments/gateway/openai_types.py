"""The JSON of the OpenAI chat API: requests in, completions and chunks out."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deployments.gateway.validation import (
    MAX_INT32,
    SAMPLING_FIELDS,
    boolean,
    integer,
    make_spec,
    refuse_unknown,
    role,
    text,
)
from deployments.service import ChatTurn, Finish, GenerationSpec, ModelCard
from messages.errors import InvalidRequest
from messages.tokens import Usage

_STRUCTURE = ("model", "messages", "stream", "stream_options", "max_completion_tokens")
_FIELDS = frozenset((*_STRUCTURE, *SAMPLING_FIELDS))

Json = dict[str, Any]


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
    sampling = {name: fields.get(name) for name in SAMPLING_FIELDS}
    sampling["max_tokens"] = _token_limit(fields)
    stream = _flag(fields.get("stream"), "stream")
    model = fields.get("model")
    return ChatRequest(
        spec=make_spec(
            prompt=_parse_messages(fields.get("messages")),
            model=None if model is None else text(model, "model"),
            sampling=sampling,
        ),
        stream=stream,
        include_usage=_parse_include_usage(fields.get("stream_options"), stream=stream),
    )


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
    refuse_unknown(message, ("role", "content"), inside=name)
    return ChatTurn(
        role=role(message.get("role"), f"{name}.role"),
        content=_parse_content(message.get("content"), f"{name}.content"),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """What all JSON objects of one answer have in common."""

    request_id: str
    model: str
    created: int

    def completion(self, content: str, finish: Finish) -> Json:
        """The whole answer."""
        message = {"role": "assistant", "content": content, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": str(finish.reason)}
        return self._object("chat.completion", [choice]) | {"usage": usage(finish.usage)}

    def chunk(self, delta: Json, *, finish_reason: str | None = None) -> Json:
        """A part of a streamed answer."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._object("chat.completion.chunk", [choice])

    def usage_chunk(self, counts: Usage) -> Json:
        """The part after the last one, with no choices."""
        return self._object("chat.completion.chunk", []) | {"usage": usage(counts)}

    def _object(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": f"chatcmpl-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def make_answer(request_id: str, model: str) -> ChatAnswer:
    """An answer that begins now."""
    return ChatAnswer(request_id=request_id, model=model, created=int(time.time()))


def usage(counts: Usage) -> Json:
    """The usage object."""
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
    }


def model_object(card: ModelCard, *, created: int) -> Json:
    """One served model."""
    return {
        "id": card.name,
        "object": "model",
        "created": created,
        "owned_by": "kvferry",
        "context_length": card.context_length,
    }
