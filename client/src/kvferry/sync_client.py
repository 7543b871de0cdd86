"""The sync client: `AsyncClient` without the waiting.

Generated from async_client.py by scripts/unasync.py; edit that file.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

import grpc

from kvferry.errors import StreamBroken, error_of_call
from kvferry.explanations import explanation_of
from kvferry.requests import make_chat_request, make_generate_request, make_sampling
from kvferry.results import Chunk, Completion, GrowingChoice, ModelCard, completion_of, prompt_logprobs_of
from kvferry.v1 import inference_pb2 as v1
from kvferry.v1.inference_pb2_grpc import InferenceStub

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from typing_extensions import Self, Unpack

    from kvferry.explanations import Explanation
    from kvferry.requests import Messages, Prompt, Sampling
    from kvferry.results import TokenLogprob


class _Call(Protocol):
    """What a stream needs of a call that is under way."""

    def __iter__(self) -> Iterator[v1.GenerateChunk]: ...

    def cancel(self) -> bool: ...


class Stream:
    """The growing texts of one call; iterate inside `with`: leaving that early cancels the call on the server."""

    def __init__(self, start: Callable[[], _Call]) -> None:
        self._start = start
        self._call: _Call | None = None
        self._messages: Iterator[v1.GenerateChunk] | None = None
        self._choices: dict[int, GrowingChoice] = {}
        self._prompt_logprobs: list[TokenLogprob | None] = []
        self._result: Completion | None = None
        self.request_id = ""
        """The server's name of the request; empty until the first chunk is there."""

    def __enter__(self) -> Self:
        if self._call is not None:
            raise RuntimeError("a stream is used once; ask the client for another one")
        self._call = self._start()
        self._messages = iter(self._call)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._messages = None
        if self._call is not None:
            self._call.cancel()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        """Wait for the next piece.

        Raises:
            KVFerryError: The call failed; what had arrived is in its `partial_text`.
        """
        while True:
            message = self._next_message()
            chunk = self._take(message)
            if chunk.token_ids or chunk.text:
                return chunk

    def _next_message(self) -> v1.GenerateChunk:
        if self._messages is None:
            raise RuntimeError("iterate over a stream inside its `with` block")
        try:
            message = next(self._messages)
        except grpc.RpcError as failure:
            raise error_of_call(failure, partial_text=self.text) from failure
        except StopIteration:
            if self._result is None:
                raise StreamBroken("the stream ended without its last message", partial_text=self.text) from None
            raise
        return message

    def _take(self, message: v1.GenerateChunk) -> Chunk:
        self.request_id = message.request_id or self.request_id
        self._prompt_logprobs.extend(prompt_logprobs_of(message.prompt_logprobs))
        chunk = self._choices.setdefault(message.choice, GrowingChoice()).add(message)
        if message.HasField("summary"):
            self._end(message.summary)
        return chunk

    def _end(self, summary: v1.Summary) -> None:
        grown = [self._choices[index] for index in sorted(self._choices)]
        finished = [one.choice(one.finish) for one in grown if one.finish is not None]
        if len(finished) < len(grown):
            raise StreamBroken("the stream ended without the finish of every choice", partial_text=self.text)
        self._result = completion_of(
            summary, choices=finished, prompt_logprobs=self._prompt_logprobs, request_id=self.request_id
        )

    @property
    def text(self) -> str:
        """What has arrived of choice 0 so far."""
        return self._choices[0].text if 0 in self._choices else ""

    @property
    def result(self) -> Completion:
        """The whole texts, why they ended and what they cost; there once the iteration has ended.

        Raises:
            RuntimeError: The stream has not ended, or it failed.
        """
        if self._result is None:
            raise RuntimeError("the stream has no result before its end")
        return self._result


class Client:
    """A connection to one KVFerry gateway; safe to share between threads.

    Args:
        target: `host:port` of the gateway's gRPC door.
        timeout_s: Time for a whole call, where the call itself names none; None is no limit.
        credentials: From `grpc.ssl_channel_credentials(...)`; None is a plain connection.
    """

    def __init__(
        self, target: str, *, timeout_s: float | None = None, credentials: grpc.ChannelCredentials | None = None
    ) -> None:
        self._timeout_s = timeout_s
        if credentials is None:
            self._channel = grpc.insecure_channel(target)
        else:
            self._channel = grpc.secure_channel(target, credentials)
        self._stub = InferenceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls that still run are cancelled."""
        self._channel.close()

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        echo: bool = False,
        **sampling: Unpack[Sampling],
    ) -> Stream:
        """Continue a prompt, piece by piece.

        Args:
            prompt: Text, or token ids.
            model: May be left out when one model is served.
            timeout_s: Time for the whole call; None is the client's own.
            echo: Begin the text of every choice with the prompt's.
            **sampling: max_tokens, temperature, n, stop and all the others of `kvferry.Sampling`.

        Raises:
            InvalidRequest: An argument does not fit the contract. Everything else is raised by the stream.
        """
        request = make_generate_request(prompt, model, make_sampling(**sampling), echo=echo)
        return Stream(partial(self._stub.Generate, request, timeout=self._limit(timeout_s)))

    def stream_chat(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Stream:
        """Answer a conversation, piece by piece; arguments as in `stream`."""
        request = make_chat_request(messages, model, make_sampling(**sampling))
        return Stream(partial(self._stub.Chat, request, timeout=self._limit(timeout_s)))

    def generate(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        echo: bool = False,
        **sampling: Unpack[Sampling],
    ) -> Completion:
        """Continue a prompt and wait for the whole text, or texts; arguments as in `stream`.

        Raises:
            KVFerryError: The call failed; what had arrived is in its `partial_text`.
        """
        with self.stream(prompt, model=model, timeout_s=timeout_s, echo=echo, **sampling) as chunks:
            for _ in chunks:
                pass
        return chunks.result

    def chat(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Completion:
        """Answer a conversation and wait for the whole text; arguments as in `stream`.

        Raises:
            KVFerryError: The call failed; what had arrived is in its `partial_text`.
        """
        with self.stream_chat(messages, model=model, timeout_s=timeout_s, **sampling) as chunks:
            for _ in chunks:
                pass
        return chunks.result

    def explain(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        echo: bool = False,
        **sampling: Unpack[Sampling],
    ) -> Explanation:
        """Say where a prompt would run if it came now, and why; nothing runs. Arguments as in `generate`.

        Raises:
            KVFerryError: The call failed, or `generate` would refuse the same.
        """
        request = make_generate_request(prompt, model, make_sampling(**sampling), echo=echo)
        return self._explain(v1.ExplainRequest(generate=request), timeout_s)

    def explain_chat(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Explanation:
        """Say where a conversation would be answered if it came now, and why; nothing runs. Arguments as in `chat`.

        Raises:
            KVFerryError: The call failed, or `chat` would refuse the same.
        """
        request = make_chat_request(messages, model, make_sampling(**sampling))
        return self._explain(v1.ExplainRequest(chat=request), timeout_s)

    def models(self, *, timeout_s: float | None = None) -> list[ModelCard]:
        """List the models that are served.

        Raises:
            KVFerryError: The call failed.
        """
        try:
            reply = self._stub.Models(v1.ModelsRequest(), timeout=self._limit(timeout_s))
        except grpc.RpcError as failure:
            raise error_of_call(failure) from failure
        return [ModelCard(name=model.name, context_length=model.context_length) for model in reply.models]

    def _explain(self, request: v1.ExplainRequest, timeout_s: float | None) -> Explanation:
        try:
            return explanation_of(self._stub.Explain(request, timeout=self._limit(timeout_s)))
        except grpc.RpcError as failure:
            raise error_of_call(failure) from failure

    def _limit(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout_s
