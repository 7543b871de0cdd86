"""The answers of the OpenAI chat API: completions, chunks, usage, models."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deployments.service import Chunk, Finish, ModelCard, ScoredToken
from messages.errors import ServingError
from messages.tokens import Usage

LEAST_LOGPROB = -9999.0
"""JSON has no minus infinity."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """What all JSON objects of one answer have in common."""

    request_id: str
    model: str
    created: int
    num_choices: int = 1
    has_logprobs: bool = False

    def completion(self, chunks: Sequence[Chunk]) -> Json:
        """The whole answer, of all its chunks.

        Raises:
            ServingError: A choice has no finish, or the request no summary.
        """
        summary = chunks[-1].summary
        if summary is None:
            raise ServingError("internal error: the answer ended without its summary")
        own = [[chunk for chunk in chunks if chunk.choice == index] for index in range(self.num_choices)]
        choices = [self._whole_choice(index, parts) for index, parts in enumerate(own)]
        return self._object("chat.completion", choices) | {"usage": usage(summary.usage)}

    def roles(self) -> list[Json]:
        """The chunks that begin a streamed answer."""
        return [
            self._chunk(index, {"role": "assistant", "content": ""}, logprobs=None) for index in range(self.num_choices)
        ]

    def parts(self, chunk: Chunk) -> list[Json]:
        """The chunks of a streamed answer that say what `chunk` does, but for the usage."""
        parts = []
        if chunk.text or chunk.logprobs:
            logprobs = _logprobs(chunk.logprobs) if self.has_logprobs else None
            parts.append(self._chunk(chunk.choice, {"content": chunk.text}, logprobs=logprobs))
        if chunk.finish is not None:
            parts.append(self._chunk(chunk.choice, {}, logprobs=None, finish=chunk.finish))
        return parts

    def usage_chunk(self, counts: Usage) -> Json:
        """The part after the last one, with no choices."""
        return self._object("chat.completion.chunk", []) | {"usage": usage(counts)}

    def _whole_choice(self, index: int, chunks: Sequence[Chunk]) -> Json:
        finish = next((chunk.finish for chunk in chunks if chunk.finish is not None), None)
        if finish is None:
            raise ServingError("internal error: a choice ended without its finish")
        content = "".join(chunk.text for chunk in chunks)
        scored = [token for chunk in chunks for token in chunk.logprobs]
        return {
            "index": index,
            "message": {"role": "assistant", "content": content, "refusal": None},
            "logprobs": _logprobs(scored) if self.has_logprobs else None,
            **_end(finish),
        }

    def _chunk(self, index: int, delta: Json, *, logprobs: Json | None, finish: Finish | None = None) -> Json:
        end = {"finish_reason": None} if finish is None else _end(finish)
        choice = {"index": index, "delta": delta, "logprobs": logprobs, **end}
        return self._object("chat.completion.chunk", [choice])

    def _object(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": f"chatcmpl-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def make_answer(request_id: str, model: str, *, num_choices: int = 1, has_logprobs: bool = False) -> ChatAnswer:
    """An answer that begins now."""
    return ChatAnswer(
        request_id=request_id,
        model=model,
        created=int(time.time()),
        num_choices=num_choices,
        has_logprobs=has_logprobs,
    )


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


def _end(finish: Finish) -> Json:
    # `stop_reason` is an extension: the stop string or the stop token id of the client that ended the choice.
    return {"finish_reason": str(finish.reason), "stop_reason": finish.stop}


def _logprobs(tokens: Sequence[ScoredToken]) -> Json:
    content = [_logprob(token) | {"top_logprobs": [_logprob(other) for other in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def _logprob(token: ScoredToken) -> Json:
    return {"token": token.text, "logprob": max(token.logprob, LEAST_LOGPROB), "bytes": list(token.data)}
