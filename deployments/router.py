"""Drives one request through the workers: decide, prefill, hand off, decode; a single gapless token stream comes out.

Token 1 leaves as soon as the prefill worker has sampled it; the transfer goes on behind it. Whatever ends the stream
early (client gone, deadline, an error) aborts the request on every worker that still holds it.
"""

import logging
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from cluster.reuse import ReusePlan
from cluster.routing import Decision, Demand, RoutingRules, WorkerView, choose
from deployments.worker_links import Exchange, Incoming, WorkerLink, WorkerLinks
from deployments.worker_views import offer_of, prompt_keys, view_of
from kv_store.registry.protocol import PrefixHits, Registry
from messages.errors import NeedsPrefill, ServingError, Unavailable
from messages.requests import GenerationRequest, RequestId
from messages.reuse import ReuseOffer
from messages.tokens import Provenance, TokenEvent
from messages.v1 import worker_pb2 as pb
from messages.wire import error_from_wire, request_to_wire, reuse_to_wire, tokens_from_wire
from telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Before its first token a request whose worker fails is placed anew, so often in all."""


class Router:
    """Places requests on live workers and relays their tokens."""

    def __init__(
        self,
        links: WorkerLinks,
        registry: Registry,
        rules: RoutingRules,
        metrics: GatewayMetrics,
        max_buffered_events: int,
    ) -> None:
        self._links = links
        self._registry = registry
        self._rules = rules
        self._metrics = metrics
        self._max_buffered_events = max_buffered_events

    def is_ready(self) -> bool:
        """Whether a prompt of any length could be placed now."""
        try:
            choose(Demand(prompt_tokens=1), self._views({}), self._rules, force_remote=True)
        except Unavailable:
            return False
        return True

    def context_length(self) -> int | None:
        """Most tokens of prompt and output together on every live worker; None when there is none."""
        return min((link.record.context_length for link in self._links.live()), default=None)

    async def route(self, request: GenerationRequest) -> "Route":
        """Decide where `request` runs.

        Raises:
            Unavailable: No worker can take it.
        """
        hits = await self._lookup(request)
        return Route(self, request, hits)

    def decide(
        self,
        request: GenerationRequest,
        hits: dict[str, int],
        *,
        force_remote: bool = False,
        avoided: frozenset[str] = frozenset(),
    ) -> Decision:
        """Choose workers from the newest loads and from `hits`, cached tokens by worker id; none of `avoided`."""
        demand = Demand(prompt_tokens=len(request.prompt_token_ids))
        decision = choose(demand, self._views(hits), self._rules, force_remote=force_remote, exclude=avoided)
        kind = "local" if decision.prefill is None else "remote"
        self._metrics.decisions.labels(prefill=kind, prompt_class=decision.prompt_class).inc()
        self._metrics.reuse_decisions.labels(verdict=decision.reuse.verdict).inc()
        return decision

    def offer(self, plan: ReusePlan, hits: dict[str, int]) -> ReuseOffer:
        """What a plan means to the worker that is to fetch."""
        return offer_of(plan, hits, [link.record for link in self._links.live()])

    def exchange(self, request_id: RequestId) -> Exchange:
        """A new conversation with workers."""
        return Exchange(request_id, self._max_buffered_events)

    def link(self, worker_id: str) -> WorkerLink:
        """The live link to a worker.

        Raises:
            Unavailable: It went away since the decision.
        """
        for link in self._links.live():
            if link.record.worker_id == worker_id:
                return link
        raise Unavailable("the chosen worker went away", worker=worker_id)

    @property
    def local_limit(self) -> int:
        """Prompt tokens that a decode worker may compute itself."""
        return self._rules.local_prefill_max_tokens

    async def _lookup(self, request: GenerationRequest) -> dict[str, int]:
        records = [link.record for link in self._links.live()]
        # A prompt whose log probabilities are wanted is computed whole.
        if not records or request.sampling.prompt_logprobs is not None:
            return {}
        # Workers of one model share the identity that roots their keys.
        record = records[0]
        keys = prompt_keys(request, record)
        hits = await self._registry.lookup(keys) if keys else PrefixHits()
        return {worker_id: blocks * record.block_size for worker_id, blocks in hits.by_worker.items()}

    def _views(self, hits: dict[str, int]) -> list[WorkerView]:
        return [view_of(link, hits.get(link.record.worker_id, 0)) for link in self._links.live()]


class Route:
    """One request on its way; iterate `tokens` once, then read what it cost.

    A worker's last token event of a request follows its WorkDone; until then events of several choices come mixed.
    """

    def __init__(self, router: Router, request: GenerationRequest, hits: dict[str, int]) -> None:
        self.cached_tokens = 0
        self.provenance = Provenance()
        self._router = router
        self._request = request
        self._hits = hits
        self._next_index: dict[int, int] = defaultdict(int)
        self._num_attempts = 0
        self._forces_remote = False
        self._avoided: frozenset[str] = frozenset()
        self._culprit = ""
        """The worker that the last failure came from."""
        self._failure: ServingError | None = None

    async def tokens(self) -> AsyncGenerator[TokenEvent, None]:
        """Every choice's tokens in order, without gap or repetition; the last event of each has a finish reason.

        Raises:
            ServingError: The request failed; everything it held is being given back.
        """
        while True:
            decision, self._culprit = self._decide(), ""
            self._num_attempts += 1
            source = self._remote(decision) if decision.prefill else self._local(decision)
            try:
                async with aclosing(self._run(source)) as events:
                    async for event in events:
                        yield event
            except NeedsPrefill:
                # The registry was wrong about what the worker has; now the prompt is computed elsewhere.
                self._hits, self._forces_remote = {}, True
            except ServingError as error:
                culprit = self._culprit or str(error.context.get("worker", ""))
                if not error.retryable or self._next_index or not culprit or self._num_attempts >= MAX_ATTEMPTS:
                    raise
                log.warning("request.retried request_id=%s error=%s", self._request.request_id, error)
                self._failure, self._avoided = error, self._avoided | {culprit}
            else:
                return

    def _decide(self) -> Decision:
        """Choose workers, not those that have failed this request; when no other is left, the failure stands."""
        try:
            return self._router.decide(
                self._request, self._hits, force_remote=self._forces_remote, avoided=self._avoided
            )
        except Unavailable:
            if self._failure is not None:
                raise self._failure from None
            raise

    async def _run(self, source: AsyncGenerator[TokenEvent, None]) -> AsyncGenerator[TokenEvent, None]:
        async with aclosing(source) as events:
            async for event in events:
                fresh = _unseen(event, self._next_index[event.choice])
                if fresh is not None:
                    self._next_index[event.choice] = fresh.first_index + len(fresh.token_ids)
                    yield fresh

    async def _local(self, decision: Decision) -> AsyncGenerator[TokenEvent, None]:
        request = self._attempt()
        exchange = self._router.exchange(request.request_id)
        self.provenance = Provenance(decode_worker=decision.decode)
        submit = pb.SubmitUnified(request=request_to_wire(request))
        if decision.is_local_limited:
            submit.max_uncached_tokens = self._router.local_limit
        submit.reuse.CopyFrom(self._offer(decision))
        try:
            exchange.join("decode", self._router.link(decision.decode))
            exchange.send("decode", pb.GatewayMessage(submit_unified=submit))
            async with aclosing(self._decode_events(exchange, counts_cached=True)) as events:
                async for event in events:
                    yield event
        finally:
            exchange.abandon("over")

    async def _remote(self, decision: Decision) -> AsyncGenerator[TokenEvent, None]:
        assert decision.prefill is not None, "a remote decision names a prefill worker"
        request = self._attempt()
        exchange = self._router.exchange(request.request_id)
        self.provenance = Provenance(prefill_worker=decision.prefill, decode_worker=decision.decode)
        try:
            exchange.join("decode", self._router.link(decision.decode))
            exchange.join("prefill", self._router.link(decision.prefill))
            submit = pb.SubmitPrefill(request=request_to_wire(request), reuse=self._offer(decision))
            exchange.send("prefill", pb.GatewayMessage(submit_prefill=submit))
            firsts = await self._first_tokens(exchange, request)
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

    async def _first_tokens(self, exchange: Exchange, request: GenerationRequest) -> list[TokenEvent]:
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
                    self._hand_over(exchange, request, event.accepted)
                case "progress":
                    exchange.send("decode", pb.GatewayMessage(progress=event.progress))
                case "work_done":
                    is_done = True
                    self.provenance = replace(
                        self.provenance,
                        prefill_computed_tokens=event.work_done.computed_prompt_tokens,
                        **_reused(event.work_done),
                    )
                case "tokens":
                    firsts.append(tokens_from_wire(event.tokens))
                    if is_done:
                        return firsts

    def _hand_over(self, exchange: Exchange, request: GenerationRequest, accepted: pb.Accepted) -> None:
        self.cached_tokens = accepted.cached_tokens
        prepare = pb.Prepare(request=request_to_wire(request), handoff=accepted.handoff)
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
        self.provenance = replace(
            self.provenance,
            decode_computed_tokens=done.computed_prompt_tokens,
            blocks_moved=done.blocks_moved,
            bytes_moved=done.bytes_moved,
            transfer_s=done.transfer_s,
            exposed_s=done.exposed_s,
            # After a hand-off, what the prefill worker has said holds.
            **({} if self.provenance.prefill_worker else _reused(done)),
        )

    def _offer(self, decision: Decision) -> pb.ReuseOffer:
        return reuse_to_wire(self._router.offer(decision.reuse, self._hits))

    def _attempt(self) -> GenerationRequest:
        return replace(self._request, request_id=RequestId(f"{self._request.request_id}.{self._num_attempts}"))

    def _event(self, exchange: Exchange, incoming: Incoming) -> pb.Event:
        """The event of a worker; its failure, or the loss of it, is raised, and needs no abort there."""
        event = incoming.event
        if not isinstance(event, ServingError) and event.WhichOneof("body") != "failed":
            return event
        self._culprit = exchange.worker_id(incoming.source)
        exchange.finish(incoming.source)
        if isinstance(event, ServingError):
            raise event
        raise error_from_wire(event.failed.error, event.failed.message)


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
