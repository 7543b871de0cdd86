"""The service behind the doors: tokenize once, route, turn tokens into text, count, and end exactly once."""

import asyncio
import hashlib
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from deployments.config import LimitsConfig
from deployments.router import Route, Router
from deployments.service import Chunk, Finish, GenerationSpec, ModelCard
from deployments.streaming import TextPiece, TextStream
from engine.tokenizer import Tokenizer
from messages.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, Overloaded, ServingError, Unavailable
from messages.requests import GenerationRequest, RequestId, SamplingParams
from messages.tokens import TokenEvent, Usage
from telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)


class TextService:
    """Implements GenerationService over the router."""

    def __init__(
        self, model: str, tokenizer: Tokenizer, router: Router, metrics: GatewayMetrics, limits: LimitsConfig
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._router = router
        self._metrics = metrics
        self._limits = limits
        self._num_running = 0
        self.is_draining = False

    @property
    def num_running(self) -> int:
        """Requests between door and end."""
        return self._num_running

    def models(self) -> list[ModelCard]:
        """The served model; none while no worker is known."""
        context_length = self._router.context_length()
        return [] if context_length is None else [ModelCard(name=self._model, context_length=context_length)]

    def is_ready(self) -> bool:
        """Whether new requests can be placed."""
        return not self.is_draining and self._router.is_ready()

    async def generate(self, spec: GenerationSpec) -> AsyncGenerator[Chunk, None]:
        """Run one request; see GenerationService."""
        code = "OK"
        started_s = time.monotonic()
        self._enter()
        try:
            request = await self._request(spec)
            async with aclosing(self._stream(request, spec, started_s)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except ServingError as error:
            code = error.code
            raise
        except (asyncio.CancelledError, GeneratorExit):
            code = "CANCELLED"
            raise
        finally:
            self._num_running -= 1
            self._metrics.in_flight.dec()
            self._metrics.requests.labels(model=self._model, code=code).inc()
            self._metrics.e2e.observe(time.monotonic() - started_s)

    def _enter(self) -> None:
        if self.is_draining:
            raise Unavailable("the server is about to stop")
        if self._num_running >= self._limits.max_queue:
            raise Overloaded("too many requests in flight", max_queue=self._limits.max_queue)
        self._num_running += 1
        self._metrics.in_flight.inc()

    async def _request(self, spec: GenerationSpec) -> GenerationRequest:
        if spec.model not in (None, "", self._model):
            raise ModelNotFound(f'no model is called "{spec.model}"; there is "{self._model}"', param="model")
        context_length = self._router.context_length()
        if context_length is None:
            raise Unavailable("no worker takes requests now")
        # Long prompts take milliseconds to tokenize; other streams must not wait for it.
        token_ids = await asyncio.to_thread(self._token_ids, spec)
        sampling = SamplingParams(
            max_tokens=_max_tokens(spec.max_tokens, len(token_ids), context_length),
            temperature=spec.temperature,
            top_p=spec.top_p,
            top_k=spec.top_k,
            seed=spec.seed if spec.seed is not None else secrets.randbits(63),
            stop=spec.stop,
            stop_token_ids=tuple(sorted(self._tokenizer.eos_ids)),
        )
        return GenerationRequest(
            request_id=RequestId(uuid.uuid4().hex),
            model=self._model,
            prompt_token_ids=token_ids,
            sampling=sampling,
            salt=_salt(spec.tenant),
            timeout_s=min(spec.timeout_s or self._limits.request_timeout_s, self._limits.request_timeout_s),
        )

    def _token_ids(self, spec: GenerationSpec) -> tuple[int, ...]:
        if isinstance(spec.prompt, str):
            token_ids = tuple(self._tokenizer.encode(spec.prompt))
        elif all(isinstance(part, int) for part in spec.prompt):
            token_ids = tuple(part for part in spec.prompt if isinstance(part, int))
            unknown = [token_id for token_id in token_ids if not 0 <= token_id < self._tokenizer.vocab_size]
            if unknown:
                raise InvalidRequest(
                    f"token id {unknown[0]} is not in the vocabulary of {self._tokenizer.vocab_size}", param="prompt"
                )
        else:
            turns = [(part.role, part.content) for part in spec.prompt if not isinstance(part, int)]
            token_ids = tuple(self._tokenizer.render_chat(turns))
        if not token_ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        return token_ids

    async def _stream(
        self, request: GenerationRequest, spec: GenerationSpec, started_s: float
    ) -> AsyncGenerator[Chunk, None]:
        self._metrics.prompt_tokens.inc(len(request.prompt_token_ids))
        text = TextStream(self._tokenizer, spec.stop)
        first_s: float | None = None
        route = await self._router.route(request)
        async with aclosing(self._until_deadline(route, request.timeout_s)) as events:
            async for event in events:
                if first_s is None:
                    first_s = time.monotonic() - started_s
                    self._metrics.ttft.observe(first_s)
                piece = text.push(event)
                self._metrics.output_tokens.inc(len(piece.token_ids))
                if piece.finish_reason is not None:
                    break
                yield Chunk(request_id=request.request_id, text=piece.text, token_ids=piece.token_ids)
            else:
                raise ServingError("the stream ended without a last token")
        self._metrics.cached_tokens.inc(route.cached_tokens)
        finish = _finish(piece, request, route, text.num_tokens, (first_s, time.monotonic() - started_s))
        yield Chunk(request_id=request.request_id, text=piece.text, token_ids=piece.token_ids, finish=finish)

    @staticmethod
    async def _until_deadline(route: Route, timeout_s: float | None) -> AsyncGenerator[TokenEvent, None]:
        """The route's tokens; each wait is bounded, and none spans a yield, where another task may go on."""
        deadline_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        async with aclosing(route.tokens()) as events:
            while True:
                try:
                    async with asyncio.timeout_at(deadline_s):
                        event = await anext(events)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise DeadlineExceeded("the request's time is over", timeout_s=timeout_s) from None
                yield event


def _finish(
    piece: TextPiece, request: GenerationRequest, route: Route, num_tokens: int, seconds: tuple[float, float]
) -> Finish:
    assert piece.finish_reason is not None, "only a last piece finishes"
    return Finish(
        reason=piece.finish_reason,
        usage=Usage(
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=num_tokens,
            cached_tokens=route.cached_tokens,
        ),
        provenance=route.provenance,
        first_token_s=seconds[0],
        total_s=seconds[1],
        stop=piece.stop,
    )


def _max_tokens(wanted: int | None, prompt_tokens: int, context_length: int) -> int:
    room = context_length - prompt_tokens
    if room < 1:
        raise InvalidRequest(
            f"the prompt has {prompt_tokens} tokens; the context of {context_length} holds no more", param="prompt"
        )
    if wanted is None:
        return room
    if wanted > room:
        raise InvalidRequest(
            f"max_tokens is {wanted}, but the context of {context_length} holds {room} after a prompt of "
            f"{prompt_tokens} tokens",
            param="max_tokens",
        )
    return wanted


def _salt(tenant: str) -> bytes:
    return hashlib.sha256(b"kvferry-tenant-v1\0" + tenant.encode()).digest() if tenant else b""
