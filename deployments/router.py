"""Finds out who holds a request's prefix, has it sent to workers, and knows the links to them."""

from cluster.explanation import PlacementExplanation
from cluster.reuse import ReusePlan
from deployments.dispatcher import Ask, Dispatcher, Sent
from deployments.route import Route
from deployments.worker_links import Exchange, WorkerLink, WorkerLinks
from deployments.worker_views import offer_of, prompt_keys
from kv_store.registry.protocol import PrefixHits, Registry
from messages.errors import Unavailable
from messages.requests import GenerationRequest, RequestId
from messages.reuse import ReuseOffer
from telemetry.metrics import GatewayMetrics


class Router:
    """Of one gateway.

    Args:
        links: To the workers.
        registry: Says who holds which prefix.
        dispatcher: Chooses workers and reserves on them.
        metrics: Where migrations are counted.
        max_buffered_events: Events of a request that may wait for its client.
    """

    def __init__(
        self,
        links: WorkerLinks,
        registry: Registry,
        dispatcher: Dispatcher,
        metrics: GatewayMetrics,
        max_buffered_events: int,
    ) -> None:
        self._links = links
        self._registry = registry
        self.dispatcher = dispatcher
        self.metrics = metrics
        self._max_buffered_events = max_buffered_events

    def is_ready(self) -> bool:
        """Whether a prompt of any length could be placed now."""
        return self.dispatcher.can_place()

    def capacity_tokens(self) -> int:
        """KV tokens of all live workers that decode."""
        return self.dispatcher.fleet.capacity_tokens()

    def context_length(self) -> int | None:
        """Most tokens of prompt and output together on every live worker; None when there is none."""
        return min((link.record.context_length for link in self._links.live()), default=None)

    async def route(self, request: GenerationRequest) -> Route:
        """Make a way for `request`; where it leads is decided when its tokens are asked for."""
        return Route(self, request, await self.lookup(request))

    async def explain(self, request: GenerationRequest) -> PlacementExplanation:
        """Say where `request` would go now; nothing runs and nothing is reserved.

        Raises:
            Unavailable: No worker can take it.
        """
        ask = Ask(request=request, hits=await self.lookup(request), nonce=request.request_id)
        return self.dispatcher.explain(ask)

    async def lookup(self, request: GenerationRequest) -> dict[str, int]:
        """Cached leading tokens of a request by worker id; empty when nothing is known."""
        records = [link.record for link in self._links.live()]
        # A prompt whose log probabilities are wanted is computed whole.
        if not records or request.sampling.prompt_logprobs is not None:
            return {}
        # Workers of one model share the identity that roots their keys.
        record = records[0]
        keys = prompt_keys(request, record)
        hits = await self._registry.lookup(keys) if keys else PrefixHits()
        return {worker_id: blocks * record.block_size for worker_id, blocks in hits.by_worker.items()}

    async def send(self, ask: Ask) -> Sent:
        """Choose workers for one attempt and reserve on them.

        Raises:
            Unavailable: No worker can take it.
        """
        return await self.dispatcher.send(ask)

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
        link = self.dispatcher.fleet.link(worker_id)
        if link is not None and link.is_up:
            return link
        raise Unavailable("the chosen worker went away", worker=worker_id)
