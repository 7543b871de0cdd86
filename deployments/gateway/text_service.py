"""The service behind the doors: tokenize once, route, turn tokens into text, count, and end exactly once."""

import asyncio
import math
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from cluster.admission import Admission, AdmissionRules, Ask
from cluster.explanation import PlacementExplanation
from deployments.config import LimitsConfig
from deployments.gateway.sampling import check_ids, make_sampling
from deployments.gateway.waiting_line import WaitingLine
from deployments.service import ChatTurn, Chunk, Explanation, GenerationSpec, ModelCard, Summary
from deployments.streaming import TextAnswer
from engine.tokenizer import Tokenizer
from kv_store.block_key import tenant_salt
from messages.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, Overloaded, ServingError, Unavailable
from messages.requests import GenerationRequest, RequestId, SamplingParams
from messages.tokens import Provenance, TokenEvent, Usage
from telemetry.metrics import GatewayMetrics

_NO_LIMIT = 1 << 62


class TokenRoute(Protocol):
    """One request on its way; what it cost is right once `tokens` has ended."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was found."""
        ...

    @property
    def provenance(self) -> Provenance:
        """Who computed what."""
        ...

    def tokens(self) -> AsyncGenerator[TokenEvent, None]:
        """Events of all choices; each choice's are in order and end with a finish reason. Closing it aborts."""
        ...


class TokenSource(Protocol):
    """What turns requests into tokens: the router, or a script."""

    def is_ready(self) -> bool:
        """Whether requests can be placed now."""
        ...

    def context_length(self) -> int | None:
        """Most tokens of prompt and output together; None when there is no worker."""
        ...

    def capacity_tokens(self) -> int:
        """KV tokens of all workers that decode now."""
        ...

    async def route(self, request: GenerationRequest) -> TokenRoute:
        """Decide where a request runs.

        Raises:
            Unavailable: No worker can take it.
        """
        ...

    async def explain(self, request: GenerationRequest) -> PlacementExplanation:
        """Say where a request would run now; nothing runs and nothing is reserved.

        Raises:
            Unavailable: No worker can take it.
        """
        ...


class TextService:
    """Implements GenerationService over a router."""

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        router: TokenSource,
        metrics: GatewayMetrics,
        limits: LimitsConfig,
        *,
        max_wait_s: float = 10.0,
    ) -> None:
        """Begin with nobody inside.

        Args:
            model: What clients call the model.
            tokenizer: Of the model.
            router: Turns requests into tokens.
            metrics: What is counted.
            limits: On requests.
            max_wait_s: A request that waits for tokens lets others of its priority pass no longer than this.
        """
        self._model = model
        self._tokenizer = tokenizer
        self._router = router
        self._metrics = metrics
        self._limits = limits
        rules = AdmissionRules(
            max_requests=limits.max_queue, max_waiting_tokens=limits.max_waiting_tokens, max_wait_s=max_wait_s
        )
        self._line = WaitingLine(Admission(rules, 0, time.monotonic))
        metrics.waiting.set_function(lambda: self._line.admission.num_waiting)
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
            self.tend()
            async with self._line.place(self._ask(request)):
                # Its time has run since it came.
                left_s = max(0.0, (request.timeout_s or math.inf) - (time.monotonic() - started_s))
                async with aclosing(self._stream(replace(request, timeout_s=left_s), spec, started_s)) as chunks:
                    async for chunk in chunks:
                        yield chunk
        except ServingError as error:
            code = error.code
            raise
        except (asyncio.CancelledError, GeneratorExit):
            code = "CANCELLED"
            raise
        finally:
            self._leave()
            self._metrics.requests.labels(model=self._model, code=code).inc()
            self._metrics.e2e.observe(time.monotonic() - started_s)

    async def explain(self, spec: GenerationSpec) -> Explanation:
        """Say where a request would run now; see GenerationService."""
        # It takes a place like any other while it is tokenized, or questions without end would go past every bound.
        self._enter()
        try:
            async with asyncio.timeout(self._timeout_s(spec)):
                request = await self._request(spec)
                placement = await self._router.explain(request)
        except TimeoutError:
            raise DeadlineExceeded("the request's time is over", timeout_s=self._timeout_s(spec)) from None
        finally:
            self._leave()
        return Explanation(prompt_tokens=len(request.prompt_token_ids), placement=placement)

    def tend(self) -> None:
        """Follow the workers that come and go, and the clock: whoever waits is told; to be called now and then."""
        admission, most = self._line.admission, self._limits.max_running_tokens
        has_room = self._router.capacity_tokens() > 0
        self._line.tell(admission.set_budget((_NO_LIMIT if most is None else most) if has_room else 0))
        self._line.tell(admission.expire())

    def _ask(self, request: GenerationRequest) -> Ask:
        sampling = request.sampling
        output = sampling.n * min(sampling.max_tokens, self._limits.counted_output_tokens)
        return Ask(
            request_id=request.request_id,
            tokens=len(request.prompt_token_ids) + output,
            priority=request.priority,
            timeout_s=request.timeout_s,
        )

    def _enter(self) -> None:
        if self.is_draining:
            raise Unavailable("the server is about to stop")
        if self._num_running >= self._limits.max_queue:
            raise Overloaded("too many requests in flight", max_queue=self._limits.max_queue)
        self._num_running += 1
        self._metrics.in_flight.inc()

    def _leave(self) -> None:
        self._num_running -= 1
        self._metrics.in_flight.dec()

    def _timeout_s(self, spec: GenerationSpec) -> float:
        return min(spec.timeout_s or self._limits.request_timeout_s, self._limits.request_timeout_s)

    async def _request(self, spec: GenerationSpec) -> GenerationRequest:
        if spec.model not in (None, "", self._model):
            raise ModelNotFound(f'no model is called "{spec.model}"; there is "{self._model}"', param="model")
        context_length = self._router.context_length()
        if context_length is None:
            raise Unavailable("no worker takes requests now")
        # Long prompts take milliseconds to tokenize; other streams must not wait for it.
        token_ids, sampling = await asyncio.to_thread(self._tokenize, spec, context_length)
        return GenerationRequest(
            request_id=RequestId(uuid.uuid4().hex),
            model=self._model,
            prompt_token_ids=token_ids,
            sampling=sampling,
            salt=tenant_salt(spec.tenant),
            timeout_s=self._timeout_s(spec),
            priority=spec.priority,
        )

    def _tokenize(self, spec: GenerationSpec, context_length: int) -> tuple[tuple[int, ...], SamplingParams]:
        token_ids = self._token_ids(spec)
        return token_ids, make_sampling(
            spec, self._tokenizer, prompt_tokens=len(token_ids), context_length=context_length
        )

    def _token_ids(self, spec: GenerationSpec) -> tuple[int, ...]:
        if isinstance(spec.prompt, str):
            token_ids = tuple(self._tokenizer.encode(spec.prompt))
        elif all(isinstance(part, int) for part in spec.prompt):
            token_ids = tuple(part for part in spec.prompt if isinstance(part, int))
            check_ids(token_ids, self._tokenizer.vocab_size, "prompt")
        else:
            turns = [_template_turn(part) for part in spec.prompt if isinstance(part, ChatTurn)]
            token_ids = tuple(self._tokenizer.render_chat(turns))
        if not token_ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        return token_ids

    async def _stream(
        self, request: GenerationRequest, spec: GenerationSpec, started_s: float
    ) -> AsyncGenerator[Chunk, None]:
        self._metrics.prompt_tokens.inc(len(request.prompt_token_ids))
        answer = TextAnswer(request, spec, self._tokenizer)
        first_s: float | None = None
        last: Chunk | None = None
        route = await self._router.route(request)
        async with aclosing(self._until_deadline(route, request.timeout_s)) as events:
            async for event in events:
                if first_s is None:
                    first_s = time.monotonic() - started_s
                    self._metrics.ttft.observe(first_s)
                for chunk in answer.take(event):
                    self._metrics.output_tokens.inc(len(chunk.token_ids))
                    if answer.is_done:
                        last = chunk
                        break
                    yield chunk
                if last is not None:
                    break
        if last is None or first_s is None:
            raise ServingError("the stream ended without a last token")
        self._metrics.cached_tokens.inc(route.cached_tokens)
        usage = Usage(
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=answer.num_tokens,
            cached_tokens=route.cached_tokens,
        )
        total_s = time.monotonic() - started_s
        summary = Summary(usage=usage, provenance=route.provenance, first_token_s=first_s, total_s=total_s)
        yield replace(last, summary=summary)

    @staticmethod
    async def _until_deadline(route: TokenRoute, timeout_s: float | None) -> AsyncGenerator[TokenEvent, None]:
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


def _template_turn(turn: ChatTurn) -> dict[str, str]:
    known = {"role": turn.role, "content": turn.content}
    return known | {"tool_call_id": turn.tool_call_id} if turn.tool_call_id else known
