"""An in-process server with scripted answers, for tests of programs that use this package.

    async with FakeServer(Answer("Hel", "lo"), Answer("par", error=Overloaded("busy"))) as server:
        async with AsyncClient(server.target) as client: ...

`with FakeServer(...)` runs the same server in a thread of its own, for tests without an event loop. Answers are used
in order, one per call; when they are used up, the server echoes the last thing it was told, word by word. Of what a
request asks for, the server honours `n` (every choice is the same), `logprobs` (all are -1, and nothing else is as
likely) and `echo`; the rest is in `requests`, to be looked at. An explanation uses up an answer too, of which only
`error` and `held` count: it names one decode worker, and for a prompt of more than 32 words one prefill worker.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from kvferry.errors import ERROR_OF_STATUS, KVFerryError
from kvferry.v1 import inference_pb2 as v1
from kvferry.v1.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator
    from types import TracebackType

    from typing_extensions import Self

    TextRequest = v1.GenerateRequest | v1.ChatRequest
    Request = TextRequest | v1.ExplainRequest
    Context = grpc.aio.ServicerContext[Any, Any]

_REASONS = {"stop": v1.FINISH_REASON_STOP, "length": v1.FINISH_REASON_LENGTH}
_LOCAL_WORDS = 32
"""So long a prompt is computed by the decode worker."""


class Answer:
    """What the server does for one call: send the pieces, then end in exactly one way.

    Args:
        *pieces: Text of each chunk; every piece counts as one token.
        reason: Finish reason of a good end, `stop` or `length`.
        stop: The stop string, or the stop token id, that ended the text.
        error: End with this error instead.
        broken: End the stream without its last message instead.
        held: Do not end at all: wait until the client cancels.
    """

    def __init__(
        self,
        *pieces: str,
        reason: str = "stop",
        stop: str | int | None = None,
        error: KVFerryError | None = None,
        broken: bool = False,
        held: bool = False,
    ) -> None:
        self.pieces = pieces
        self.reason = _REASONS[reason]
        self.stop = stop
        self.error = error
        self.broken = broken
        self.held = held


class FakeServer:
    """A real gRPC server on a free loopback port; `target` is its address while it is open.

    Args:
        *answers: Used in order, one per call.
        models: Name and context length of each model that `models()` lists.
    """

    def __init__(self, *answers: Answer, models: tuple[tuple[str, int], ...] = (("fake", 4096),)) -> None:
        self._servicer = _Servicer(answers, models)
        self._server: grpc.aio.Server | None = None
        self._thread: _ServerThread | None = None
        self.target = ""

    @property
    def requests(self) -> list[Request]:
        """Every request that arrived, in order, as messages of the contract."""
        return self._servicer.requests

    @property
    def num_cancelled(self) -> int:
        """Calls that the client gave up before their end."""
        return self._servicer.num_cancelled

    def wait_until_idle(self, *, timeout_s: float = 5.0) -> bool:
        """Block until no call runs; False when that took too long. Inside a coroutine, call it in another thread."""
        return self._servicer.is_idle.wait(timeout_s)

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        add_InferenceServicer_to_server(self._servicer, self._server)
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            await self._server.stop(grace=None)

    def __enter__(self) -> Self:
        self._thread = _ServerThread(self)
        self._thread.start()
        self._thread.is_open.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._thread.close()


async def _play(
    answer: Answer, request_id: str, request: TextRequest, context: Context
) -> AsyncIterator[v1.GenerateChunk]:
    prompt, n = _prompt_of(request), request.sampling.n or 1
    for position, piece in enumerate(answer.pieces):
        before = prompt if position == 0 and isinstance(request, v1.GenerateRequest) and request.echo else ""
        logprobs = [_logprob(position, piece)] if request.sampling.HasField("logprobs") else []
        for choice in range(n):
            yield v1.GenerateChunk(
                request_id=request_id, choice=choice, text=before + piece, token_ids=[position], logprobs=logprobs
            )
    await _hold_or_fail(answer, context)
    if answer.broken:
        return
    usage = v1.Usage(prompt_tokens=len(prompt.split()), completion_tokens=len(answer.pieces) * n)
    for choice in range(n):
        summary = v1.Summary(usage=usage) if choice == n - 1 else None
        yield v1.GenerateChunk(request_id=request_id, choice=choice, finish=_finish(answer), summary=summary)


async def _hold_or_fail(answer: Answer, context: Context) -> None:
    if answer.held:
        await asyncio.Event().wait()
    if answer.error is not None:
        await context.abort(_status_of(answer.error), answer.error.message)


def _explanation(prompt_tokens: int) -> v1.Explanation:
    here_ms, there_ms = 10.0 * prompt_tokens, 5.0 * prompt_tokens + 10.0
    is_local = prompt_tokens <= _LOCAL_WORDS
    decode = _candidate("fake-decode", "decode", prompt_tokens, first_token_ms=min(here_ms, there_ms), tokens_ms=640.0)
    explanation = v1.Explanation(
        prompt_tokens=prompt_tokens,
        decode=v1.StageExplanation(policy="predicted_latency", candidates=[decode]),
        decode_worker="fake-decode",
        reason=v1.PREFILL_REASON_FEW_TOKENS if is_local else v1.PREFILL_REASON_SOONER_THERE,
    )
    if not is_local:
        prefill = _candidate("fake-prefill", "prefill", prompt_tokens, compute_ms=there_ms - 10.0, handoff_ms=10.0)
        explanation.prefill.policy = "predicted_latency"
        explanation.prefill.candidates.append(prefill)
        explanation.prefill_worker = "fake-prefill"
        explanation.local_ms, explanation.remote_ms = here_ms, there_ms
    return explanation


def _candidate(worker: str, pool: str, prompt_tokens: int, **parts: float) -> v1.CandidateScore:
    return v1.CandidateScore(
        worker=worker,
        pool=pool,
        is_allowed=True,
        rank=0,
        cost=sum(parts.values()),
        remaining_tokens=prompt_tokens,
        parts=[v1.CostPart(name=name, value=value) for name, value in parts.items()],
    )


def _finish(answer: Answer) -> v1.Finish:
    if answer.stop is None:
        return v1.Finish(reason=answer.reason)
    if isinstance(answer.stop, int):
        return v1.Finish(reason=answer.reason, stop_token_id=answer.stop)
    return v1.Finish(reason=answer.reason, stop_string=answer.stop)


def _logprob(token_id: int, piece: str) -> v1.TokenLogprob:
    return v1.TokenLogprob(token_id=token_id, text=piece, text_bytes=piece.encode(), logprob=-1.0)


def _prompt_of(request: TextRequest) -> str:
    if isinstance(request, v1.ChatRequest):
        return request.messages[-1].content if request.messages else ""
    return request.text or " ".join(map(str, request.token_ids.ids))


def _echo(prompt: str) -> Answer:
    first, *rest = prompt.split() or [""]
    return Answer(first, *(f" {word}" for word in rest))


def _status_of(error: KVFerryError) -> grpc.StatusCode:
    codes = (code for code, kind in ERROR_OF_STATUS.items() if isinstance(error, kind))
    return next(codes, grpc.StatusCode.INTERNAL)


class _Servicer(InferenceServicer):
    """Plays the answers; idle exactly when no call is active."""

    def __init__(self, answers: tuple[Answer, ...], models: tuple[tuple[str, int], ...]) -> None:
        self.requests: list[Request] = []
        self.num_cancelled = 0
        self.is_idle = threading.Event()
        self.is_idle.set()
        self._answers = deque(answers)
        self._models = models
        self._num_active = 0

    # grpc.aio looks at the handler itself: only an async generator function may answer with a stream.
    async def Generate(self, request: v1.GenerateRequest, context: Context) -> AsyncIterator[v1.GenerateChunk]:  # noqa: N802
        async with aclosing(self._run(request, context)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def Chat(self, request: v1.ChatRequest, context: Context) -> AsyncIterator[v1.GenerateChunk]:  # noqa: N802
        async with aclosing(self._run(request, context)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def Models(self, request: v1.ModelsRequest, context: object) -> v1.ModelsResponse:  # noqa: N802
        return v1.ModelsResponse(models=[v1.Model(name=name, context_length=size) for name, size in self._models])

    async def Explain(self, request: v1.ExplainRequest, context: Context) -> v1.Explanation:  # noqa: N802
        asked = request.chat if request.HasField("chat") else request.generate
        with self._counted(request):
            await _hold_or_fail(self._next_answer(asked), context)
            return _explanation(len(_prompt_of(asked).split()))

    async def _run(self, request: TextRequest, context: Context) -> AsyncGenerator[v1.GenerateChunk, None]:
        with self._counted(request):
            answer = self._next_answer(request)
            async for chunk in _play(answer, f"fake-{len(self.requests)}", request, context):
                yield chunk

    def _next_answer(self, request: TextRequest) -> Answer:
        return self._answers.popleft() if self._answers else _echo(_prompt_of(request))

    @contextmanager
    def _counted(self, request: Request) -> Iterator[None]:
        self.requests.append(request)
        self._num_active += 1
        self.is_idle.clear()
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cancelled += 1
            raise
        finally:
            self._num_active -= 1
            if not self._num_active:
                self.is_idle.set()


class _ServerThread(threading.Thread):
    """Runs a fake server in an event loop of its own until `close`."""

    def __init__(self, fake: FakeServer) -> None:
        super().__init__(name="kvferry-fake-server", daemon=True)
        self.is_open = threading.Event()
        self._fake = fake
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()

    def run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            # A server that cannot start must not leave `with FakeServer()` waiting.
            self.is_open.set()
            self._loop.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        self.join()

    async def _serve(self) -> None:
        async with self._fake:
            self.is_open.set()
            await self._closing.wait()
