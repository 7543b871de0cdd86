"""Places requests on live workers: who holds their prefix, who is how busy, and so who gets them."""

from cluster.reuse import ReusePlan
from cluster.routing import Decision, Demand, RoutingRules, WorkerView, choose
from deployments.route import Route
from deployments.worker_links import Exchange, WorkerLink, WorkerLinks
from deployments.worker_views import offer_of, prompt_keys, view_of
from kv_store.registry.protocol import PrefixHits, Registry
from messages.errors import Unavailable
from messages.requests import GenerationRequest, RequestId
from messages.reuse import ReuseOffer
from telemetry.metrics import GatewayMetrics


class Router:
    """Decides, and knows the links to who was chosen."""

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
        self.metrics = metrics
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

    async def route(self, request: GenerationRequest) -> Route:
        """Make a way for `request`; where it leads is decided when its tokens are asked for."""
        return Route(self, request, await self.lookup(request))

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

    def decide(
        self,
        request: GenerationRequest,
        hits: dict[str, int],
        *,
        force_remote: bool = False,
        avoided: frozenset[str] = frozenset(),
    ) -> Decision:
        """Choose workers from the newest loads and from `hits`, cached tokens by worker id; none of `avoided`."""
        demand = Demand(prompt_tokens=len(request.known_token_ids))
        decision = choose(demand, self._views(hits), self._rules, force_remote=force_remote, exclude=avoided)
        kind = "local" if decision.prefill is None else "remote"
        self.metrics.decisions.labels(prefill=kind, prompt_class=decision.prompt_class).inc()
        self.metrics.reuse_decisions.labels(verdict=decision.reuse.verdict).inc()
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

    def _views(self, hits: dict[str, int]) -> list[WorkerView]:
        return [view_of(link, hits.get(link.record.worker_id, 0)) for link in self._links.live()]
