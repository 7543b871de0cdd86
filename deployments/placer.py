"""What the way of a request needs of the gateway that it runs in."""

from typing import Protocol

from cluster.reuse import ReusePlan
from deployments.dispatcher import Ask, Dispatcher, Sent
from deployments.worker_links import Exchange, WorkerLink
from messages.requests import GenerationRequest, RequestId
from messages.reuse import ReuseOffer
from telemetry.metrics import GatewayMetrics


class Placer(Protocol):
    """What a route asks of its router."""

    metrics: GatewayMetrics
    dispatcher: Dispatcher

    async def lookup(self, request: GenerationRequest) -> dict[str, int]:
        """Cached leading tokens of a request by worker id."""
        ...

    async def send(self, ask: Ask) -> Sent:
        """Choose workers for one attempt and reserve on them.

        Raises:
            Unavailable: No worker can take it.
        """
        ...

    def offer(self, plan: ReusePlan, hits: dict[str, int]) -> ReuseOffer:
        """What a plan means to the worker that is to fetch."""
        ...

    def exchange(self, request_id: RequestId) -> Exchange:
        """A new conversation with workers."""
        ...

    def link(self, worker_id: str) -> WorkerLink:
        """The live link to a worker.

        Raises:
            Unavailable: It went away since it was chosen.
        """
        ...
