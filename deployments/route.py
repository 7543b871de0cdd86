"""One request on its way: prefill, hand off, decode; when a worker is lost on the way, again on another one.

Token 1 leaves as soon as the prefill worker has sampled it; the transfer goes on behind it. A request whose worker is
lost before its first token is placed anew. Afterwards each choice that has not ended is replayed: another worker gets
the prompt and what was generated, computes their KV and goes on, so the client sees one gapless stream. Whatever ends
the stream early (client gone, deadline, an error) aborts the request on every worker that still holds it.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from deployments.dispatcher import Ask, Role, Sent
from deployments.merge import merge
from deployments.placer import Placer
from deployments.worker_links import Exchange, Incoming
from messages.errors import NeedsPrefill, ServingError, Unavailable
from messages.requests import GenerationRequest, RequestId
from messages.reservations import Reservation
from messages.tokens import Provenance, TokenEvent
from messages.v1 import worker_pb2 as pb
from messages.wire import error_from_wire, request_to_wire, reuse_to_wire, tokens_from_wire

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Before its first token a request whose worker fails is placed anew, so often in all."""
MAX_REPLAYS = 5
"""A choice loses its worker so often before the client hears of it."""


class Route:
    """One request on its way; iterate `tokens` once, then read what it cost.

    A worker's last token event of a request follows its WorkDone; until then events of several choices come mixed.
    """

    def __init__(
        self,
        router: Placer,
        request: GenerationRequest,
        hits: dict[str, int],
        *,
        num_replays: int = 0,
        failure: ServingError | None = None,
        avoided: frozenset[str] = frozenset(),
    ) -> None:
        """Begin nothing yet.

        Args:
            router: Places it, and has the links.
            request: What to run.
            hits: Cached tokens by worker id.
            num_replays: How often its choice has lost its worker.
            failure: What it lost its last worker by.
            avoided: Workers that must not get it.
        """
        self.cached_tokens = 0
        self._provenance = Provenance()
        self._router = router
        self._request = request
        self._hits = hits
        given = list(request.generated_token_ids)
        self._outputs: dict[int, list[int]] = defaultdict(list, {request.choice: given} if given else {})
        """Tokens by choice, as the client has seen them."""
        self._ended: set[int] = set()
        self._heirs: list[Route] = []
        """What goes on in its place after a loss."""
        self._started_s = time.monotonic()
        self._num_attempts = 0
        self._num_replays = num_replays
        self._forces_remote = False
        self._avoided = avoided
        self._sent: Sent | None = None
        self._kept: Reservation | None = None
        """On the decode worker, for the next attempt."""
        self._culprit = ""
        """The worker that the last failure came from."""
        self._failure = failure

    async def tokens(self) -> AsyncGenerator[TokenEvent, None]:
        """Every choice's tokens in order, without gap or repetition; the last event of each has a finish reason.

        Raises:
            ServingError: The request failed; everything it held is being given back.
        """
        while True:
            self._num_attempts += 1
            self._sent = sent = await self._send()
            self._culprit = ""
            source = self._remote(sent) if sent.prefill else self._local(sent)
            try:
                async with aclosing(self._run(source)) as events:
                    async for event in events:
                        yield event
            except NeedsPrefill:
                # The registry was wrong about what the worker has; now the prompt is computed elsewhere.
                self._hits, self._forces_remote = {}, True
            except ServingError as error:
                self._take_loss(error)
                if self._has_progressed:
                    break
            else:
                return
            finally:
                self._router.dispatcher.release(*(held for held in sent.reservations.values() if held != self._kept))
        async with aclosing(self._replay()) as events:
            async for event in events:
                yield event

    @property
    def provenance(self) -> Provenance:
        """Who has computed what so far; after a loss, of the worker that goes on."""
        if not self._heirs:
            return self._provenance
        later = [heir.provenance for heir in self._heirs]
        return replace(later[-1], num_replays=1 + max(each.num_replays for each in later))

    @property
    def _has_progressed(self) -> bool:
        """Whether the client has got a token from this route."""
        return any(len(tokens) > len(self._given(choice)) for choice, tokens in self._outputs.items())

    def _given(self, choice: int) -> tuple[int, ...]:
        return self._request.generated_token_ids if choice == self._request.choice else ()

    def _take_loss(self, error: ServingError) -> None:
        """Note a failure after which the request may go on elsewhere; raise one after which it may not."""
        self._culprit = self._culprit or str(error.context.get("worker", ""))
        is_spent = self._num_replays >= MAX_REPLAYS if self._has_progressed else self._num_attempts >= MAX_ATTEMPTS
        if not error.retryable or not self._culprit or is_spent:
            raise error
        kind = "ongoing" if self._has_progressed or self._request.generated_token_ids else "new"
        log.warning("request.moved request_id=%s kind=%s error=%s", self._request.request_id, kind, error)
        self._router.metrics.migrations.labels(request=kind).inc()
        self._failure, self._avoided = error, self._avoided | {self._culprit}
        if self._sent is not None and self._culprit == self._sent.prefill and not self._has_progressed:
            # Another prefill worker computes for the same decode worker.
            self._kept = self._sent.reservations["decode"]

    async def _replay(self) -> AsyncGenerator[TokenEvent, None]:
        """Let every choice that has not ended go on elsewhere, each as a request of its own."""
        choices = [self._request.choice] if self._request.sampling.n == 1 else range(self._request.sampling.n)
        heirs = await asyncio.gather(*(self._heir(choice) for choice in choices if choice not in self._ended))
        self._heirs = heirs
        async with aclosing(merge([heir.tokens() for heir in heirs])) as events:
            async for event in events:
                yield event

    async def _heir(self, choice: int) -> "Route":
        request, generated = self._request, tuple(self._outputs[choice])
        sampling = replace(request.sampling, n=1)
        if generated:
            # The prompt's log probabilities came with the first token.
            sampling = replace(sampling, prompt_logprobs=None)
        replay = replace(
            request,
            request_id=RequestId(f"{request.request_id}.c{choice}"),
            sampling=sampling,
            generated_token_ids=generated,
            choice=choice,
        )
        # A worker that was avoided for an earlier loss may be well again.
        return Route(
            self._router,
            replay,
            await self._router.lookup(replay),
            num_replays=self._num_replays + 1,
            failure=self._failure,
            avoided=frozenset({self._culprit}),
        )

    async def _send(self) -> Sent:
        """Choose workers, not those that have failed this request; when no other is left, the failure stands."""
        ask = Ask(
            request=self._request,
            hits=self._hits,
            nonce=f"{self._request.request_id}.{self._num_attempts}",
            forces_remote=self._forces_remote,
            avoided=self._avoided,
            waited_s=time.monotonic() - self._started_s,
            kept=self._kept,
        )
        kept, self._kept = self._kept, None
        try:
            sent = await self._router.send(ask)
        except BaseException as error:
            if kept is not None:
                self._router.dispatcher.release(kept)
            if isinstance(error, Unavailable) and self._failure is not None:
                raise self._failure from None
            raise
        if kept is not None and kept not in sent.reservations.values():
            self._router.dispatcher.release(kept)
        return sent

    async def _run(self, source: AsyncGenerator[TokenEvent, None]) -> AsyncGenerator[TokenEvent, None]:
        async with aclosing(source) as events:
            async for event in events:
                output = self._outputs[event.choice]
                fresh = _unseen(event, len(output))
                if fresh is not None:
                    output.extend(fresh.token_ids)
                    if fresh.finish_reason is not None:
                        self._ended.add(event.choice)
                    yield fresh

    async def _local(self, sent: Sent) -> AsyncGenerator[TokenEvent, None]:
        request = self._attempt()
        exchange = self._router.exchange(request.request_id)
        self._provenance = Provenance(decode_worker=sent.decode)
        submit = pb.SubmitUnified(
            request=request_to_wire(request),
            max_uncached_tokens=sent.max_uncached_tokens,
            reuse=self._offer(sent),
            reservation=_reservation(sent, "decode"),
        )
        try:
            exchange.join("decode", self._router.link(sent.decode))
            exchange.send("decode", pb.GatewayMessage(submit_unified=submit))
            async with aclosing(self._decode_events(exchange, counts_cached=True)) as events:
                async for event in events:
                    yield event
        finally:
            exchange.abandon("over")

    async def _remote(self, sent: Sent) -> AsyncGenerator[TokenEvent, None]:
        assert sent.prefill is not None, "who computes the prompt elsewhere is named"
        request = self._attempt()
        exchange = self._router.exchange(request.request_id)
        self._provenance = Provenance(prefill_worker=sent.prefill, decode_worker=sent.decode)
        try:
            exchange.join("decode", self._router.link(sent.decode))
            exchange.join("prefill", self._router.link(sent.prefill))
            submit = pb.SubmitPrefill(
                request=request_to_wire(request), reuse=self._offer(sent), reservation=_reservation(sent, "prefill")
            )
            exchange.send("prefill", pb.GatewayMessage(submit_prefill=submit))
            firsts = await self._first_tokens(exchange, request, sent)
            is_over = self._begin_decode(exchange, firsts)
            for first in firsts:
                yield first
            if is_over:
                return
            async with aclosing(self._decode_events(exchange)) as events:
                async for event in events:
                    yield event
        finally:
            exchange.abandon("over")

    async def _first_tokens(self, exchange: Exchange, request: GenerationRequest, sent: Sent) -> list[TokenEvent]:
        """Follow the prefill, passing its progress on to the decode worker, until token 1 of each choice is there."""
        firsts: list[TokenEvent] = []
        is_done = False
        while True:
            incoming = await exchange.next()
            event = self._event(exchange, incoming)
            if incoming.source == "decode":
                continue
            match event.WhichOneof("body"):
                case "accepted":
                    self._hand_over(exchange, request, event.accepted, sent)
                case "progress":
                    exchange.send("decode", pb.GatewayMessage(progress=event.progress))
                case "work_done":
                    is_done = True
                    self._provenance = replace(
                        self._provenance,
                        prefill_computed_tokens=event.work_done.computed_prompt_tokens,
                        **_reused(event.work_done),
                    )
                case "tokens":
                    firsts.append(tokens_from_wire(event.tokens))
                    if is_done:
                        return firsts

    def _hand_over(self, exchange: Exchange, request: GenerationRequest, accepted: pb.Accepted, sent: Sent) -> None:
        self.cached_tokens = accepted.cached_tokens
        prepare = pb.Prepare(
            request=request_to_wire(request), handoff=accepted.handoff, reservation=_reservation(sent, "decode")
        )
        exchange.send("decode", pb.GatewayMessage(prepare=prepare))
        progress = pb.PrefillProgress(request_id=request.request_id, complete_tokens=accepted.cached_tokens)
        exchange.send("decode", pb.GatewayMessage(progress=progress))

    def _begin_decode(self, exchange: Exchange, firsts: list[TokenEvent]) -> bool:
        """Start the choices that go on; True when none does, and the decode worker is not needed."""
        going_on = [first for first in firsts if first.finish_reason is None]
        if not going_on:
            exchange.finish("prefill")
            return True
        start = pb.Start(
            request_id=exchange.request_id,
            first_tokens=[pb.FirstToken(choice=first.choice, token_id=first.token_ids[0]) for first in going_on],
        )
        exchange.send("decode", pb.GatewayMessage(start=start))
        return False

    async def _decode_events(
        self, exchange: Exchange, *, counts_cached: bool = False
    ) -> AsyncGenerator[TokenEvent, None]:
        is_done = False
        while True:
            incoming = await exchange.next()
            if incoming.source == "prefill":
                # Token 1 is here; what becomes of the prefill worker is the decode worker's business.
                continue
            event = self._event(exchange, incoming)
            match event.WhichOneof("body"):
                case "accepted" if counts_cached:
                    self.cached_tokens = event.accepted.cached_tokens
                case "work_done":
                    is_done = True
                    self._note_decode(event.work_done)
                case "tokens":
                    if is_done:
                        self._finish(exchange)
                    yield tokens_from_wire(event.tokens)
                    if is_done:
                        return

    def _finish(self, exchange: Exchange) -> None:
        exchange.finish("decode")
        if self.provenance.prefill_worker:
            # Its blocks went back when the decode worker closed the hand-off.
            exchange.finish("prefill")

    def _note_decode(self, done: pb.WorkDone) -> None:
        self._provenance = replace(
            self.provenance,
            decode_computed_tokens=done.computed_prompt_tokens,
            blocks_moved=done.blocks_moved,
            bytes_moved=done.bytes_moved,
            transfer_s=done.transfer_s,
            exposed_s=done.exposed_s,
            # After a hand-off, what the prefill worker has said holds.
            **({} if self.provenance.prefill_worker else _reused(done)),
        )

    def _offer(self, sent: Sent) -> pb.ReuseOffer:
        return reuse_to_wire(self._router.offer(sent.reuse, self._hits))

    def _attempt(self) -> GenerationRequest:
        return replace(self._request, request_id=RequestId(f"{self._request.request_id}.{self._num_attempts}"))

    def _event(self, exchange: Exchange, incoming: Incoming) -> pb.Event:
        """The event of a worker; its failure, or the loss of it, is raised, and needs no abort there."""
        event = incoming.event
        if not isinstance(event, ServingError) and event.WhichOneof("body") != "failed":
            if event.WhichOneof("body") == "accepted" and self._sent is not None:
                self._router.dispatcher.release_soon(self._sent.reservations[incoming.source])
            return event
        self._culprit = exchange.worker_id(incoming.source)
        exchange.finish(incoming.source)
        if isinstance(event, ServingError):
            raise event
        raise error_from_wire(event.failed.error, event.failed.message)


def _reservation(sent: Sent, role: Role) -> pb.Reservation:
    held = sent.reservations[role]
    return pb.Reservation(issuer=held.issuer, sequence=held.sequence)


def _reused(done: pb.WorkDone) -> dict[str, Any]:
    return {"reused_tokens": done.reused_tokens, "reused_from": tuple(done.reused_from)}


def _unseen(event: TokenEvent, next_index: int) -> TokenEvent | None:
    """The part of `event` that was not relayed before; None when nothing is left."""
    skip = next_index - event.first_index
    if skip < 0:
        raise ServingError("tokens are missing in the stream", expected=next_index, got=event.first_index)
    if skip == 0:
        return event
    if skip >= len(event.token_ids):
        return None
    return replace(event, first_index=next_index, token_ids=event.token_ids[skip:])
