"""Sends one request to its workers: who decodes, who computes the prompt, and the load reserved on both.

The comparison is pure (cluster/placement.py), over one gateway's newest heartbeats; the choice among the best is the
ledger's, which knows what all gateways have sent since. A reservation is given back when the request ends, or a moment
after its worker has it, when every gateway has heard so.
"""

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from cluster.explanation import PlacementExplanation, explain
from cluster.ledger import Ledger
from cluster.placement import Placement, PlacementRules, PrefillPlan, Ranking
from cluster.policies import PlacementDemand, Stage
from cluster.pool_board import Allowance, Reason
from cluster.pools import PromptClass, classify
from cluster.reuse import ReusePlan
from cluster.snapshot import Bools
from deployments.fleet import Fleet
from deployments.moving_ranges import MovingRanges
from messages.errors import RegistryError, Unavailable
from messages.requests import GenerationRequest
from messages.reservations import Need, Reservation
from telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)

MAX_TRIES = 3
"""A placement whose workers come and go meanwhile is made anew so often."""
HEARD_S = 0.5
"""So long after a worker has a request every gateway has had a heartbeat with it."""

Role = Literal["decode", "prefill"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What is sent where; without `prefill` the decode worker computes the prompt."""

    decode: str
    """Worker id."""
    prefill: str | None
    uncached_tokens: int
    """Prompt tokens to compute where the prompt is computed, after what is fetched."""
    prompt_class: PromptClass
    max_uncached_tokens: int | None = None
    """The decode worker must refuse when more turn out to be uncached there; None: no limit."""
    reuse: ReusePlan = field(default_factory=ReusePlan)
    """What the worker that computes the prompt fetches before."""
    reservations: Mapping[Role, Reservation] = field(default_factory=dict)
    pool_reasons: Mapping[Role, Reason] = field(default_factory=dict)
    """Why these pools, for each worker that was chosen among several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One attempt to place a request."""

    request: GenerationRequest
    hits: Mapping[str, int]
    """Cached leading tokens by worker id."""
    nonce: str
    """Names the attempt."""
    forces_remote: bool = False
    """The decode worker has refused to compute the prompt."""
    avoided: frozenset[str] = frozenset()
    """Workers that must not be chosen."""
    waited_s: float = 0.0
    kept: Reservation | None = None
    """On the decode worker of an earlier attempt, which goes on with it if it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchRules:
    """The configured side."""

    placement: PlacementRules
    long_prefill_tokens: int
    reservation_ttl_s: float = 60.0


class Dispatcher:
    """Of one gateway.

    Args:
        fleet: The workers.
        ledger: Of all gateways.
        rules: What is configured.
        metrics: Where decisions are counted.
        ranges: Hears of every prompt, and moves the ranges of the fleet's pools; None: they stay.
    """

    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        rules: DispatchRules,
        metrics: GatewayMetrics,
        ranges: MovingRanges | None = None,
    ) -> None:
        self.fleet = fleet
        self._ledger = ledger
        self._rules = rules
        self._metrics = metrics
        self._ranges = ranges
        self._endings: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()

    def can_place(self) -> bool:
        """Whether a request of any length could be placed now."""
        self.fleet.refresh()
        columns = self.fleet.snapshot.columns
        return bool(columns.can_decode.any() and columns.can_prefill.any())

    async def send(self, ask: Ask) -> Sent:
        """Choose workers and reserve on them.

        Raises:
            Unavailable: No worker can take the request.
        """
        for number in range(MAX_TRIES):
            sent = await self._try(replace(ask, nonce=f"{ask.nonce}.{number}"))
            if sent is not None:
                self._count(sent)
                return sent
        raise Unavailable("workers come and go too fast to choose one")

    def explain(self, ask: Ask) -> PlacementExplanation:
        """Say how the request would be placed now, without reserving anything.

        Raises:
            Unavailable: No worker can take it.
        """
        placement, allowed = self._compare(ask)
        ranking = placement.rank_decode(allowed.mask)
        row = ranking.rows[0]
        others, _ = self._may_prefill(placement, ask)
        plan = placement.plan_prefill(row, others, force_remote=ask.forces_remote)
        return explain(placement, (ranking, allowed.mask), row, (plan, others))

    def release(self, *reservations: Reservation) -> None:
        """What these were for is over: give back what they still hold."""
        for reservation in reservations:
            self._keep(self._release(reservation))

    def release_soon(self, reservation: Reservation) -> None:
        """The worker has the request: give its reservation back when every gateway knows."""
        self._keep(self._release(reservation, after_s=HEARD_S))

    async def close(self) -> None:
        """Give back at once what waits for that."""
        self._closing.set()
        await asyncio.gather(*self._endings)

    async def _try(self, ask: Ask) -> Sent | None:
        """Place it once; None when the snapshot has changed under it."""
        placement, allowed = self._compare(ask)
        reasons: dict[Role, Reason] = {"decode": allowed.reason}
        decode = self._still_good(ask, placement)
        if decode is None:
            ranking = placement.rank_decode(allowed.mask)
            need = placement.need(decodes=True, prefills_at=self._prefiller_at(placement, ranking.rows[0]))
            decode = await self._reserve("decode", ranking, need, ask)
        reservations: dict[Role, Reservation] = {"decode": decode}
        try:
            row = self.fleet.snapshot.row_of(decode.worker_id)
            if row is None or not placement.is_current:
                self._give_back(reservations, ask)
                return None
            others, reason = self._may_prefill(placement, ask)
            plan = placement.plan_prefill(row, others, force_remote=ask.forces_remote)
            if plan.ranking is None:
                return replace(self._sent(placement, row, None, plan, reservations), pool_reasons=reasons)
            reasons["prefill"] = reason
            need = placement.need(prefills_at=plan.ranking.rows[0])
            reservations["prefill"] = await self._reserve("prefill", plan.ranking, need, ask)
            prefill_row = self.fleet.snapshot.row_of(reservations["prefill"].worker_id)
            if prefill_row is None or not placement.is_current:
                self._give_back(reservations, ask)
                return None
            return replace(self._sent(placement, row, prefill_row, plan, reservations), pool_reasons=reasons)
        except BaseException:
            self._give_back(reservations, ask)
            raise

    def _still_good(self, ask: Ask, placement: Placement) -> Reservation | None:
        """The reservation of an earlier attempt, if that life of its worker is still there and not avoided."""
        kept, snapshot = ask.kept, placement.snapshot
        row = None if kept is None else snapshot.row_of(kept.worker_id)
        if kept is None or row is None or kept.worker_id in ask.avoided:
            return None
        return kept if snapshot.incarnations[row] == kept.incarnation else None

    def _compare(self, ask: Ask) -> tuple[Placement, Allowance]:
        """The request against the newest snapshot, and the rows that may decode it."""
        self.fleet.refresh()
        snapshot, request = self.fleet.snapshot, ask.request
        known = len(request.known_token_ids)
        demand = PlacementDemand(
            prompt_tokens=known,
            output_tokens=max(1, request.sampling.max_tokens - len(request.generated_token_ids)),
            seed=hash(request.request_id),
        )
        placement = Placement(snapshot, demand, snapshot.matched_tokens(ask.hits), self._rules.placement)
        if not len(snapshot):
            raise Unavailable("no worker takes requests now")
        return placement, self._allowed("decode", placement, ask)

    def _may_prefill(self, placement: Placement, ask: Ask) -> tuple[Bools, Reason]:
        try:
            allowed = self._allowed("prefill", placement, ask)
        except Unavailable:
            # Perhaps nobody else is needed; the plan says so if one is.
            return np.zeros(len(placement.snapshot), np.bool_), "dead"
        return allowed.mask, allowed.reason

    def _allowed(self, kind: Stage, placement: Placement, ask: Ask) -> Allowance:
        return self.fleet.board.decide(
            placement.snapshot.columns.pool,
            placement.remaining_tokens,
            len(ask.request.known_token_ids),
            kind=kind,
            waited_s=ask.waited_s,
            usable=placement.snapshot.all_but(ask.avoided),
        )

    def _prefiller_at(self, placement: Placement, row: int) -> int | None:
        """The row itself when it is expected to compute the prompt of what it decodes."""
        is_short = placement.remaining_tokens[row] <= self._rules.placement.local_prefill_max_tokens
        return row if is_short or bool(placement.snapshot.columns.can_prefill[row]) else None

    async def _reserve(self, role: Role, ranking: Ranking, need: Need, ask: Ask) -> Reservation:
        """Let the ledger choose among the candidates of the best one's pool: each pool has a book of its own."""
        snapshot = self.fleet.snapshot
        pools = [snapshot.pools[snapshot.columns.pool[row]].name for row in ranking.rows]
        candidates = [each for each, pool in zip(ranking.candidates, pools, strict=True) if pool == pools[0]]
        ttl_s = min(self._rules.reservation_ttl_s, ask.request.timeout_s or self._rules.reservation_ttl_s)
        return await self._ledger.reserve(pools[0], candidates, need, nonce=f"{ask.nonce}.{role}", ttl_s=ttl_s)

    def _sent(
        self,
        placement: Placement,
        decode_row: int,
        prefill_row: int | None,
        plan: PrefillPlan,
        reservations: dict[Role, Reservation],
    ) -> Sent:
        snapshot = placement.snapshot
        computing = decode_row if prefill_row is None else prefill_row
        uncached = int(placement.remaining_tokens[computing])
        for row in {decode_row, computing}:
            snapshot.note_choice(row)
        if plan.reason == "sooner_here":
            # The reservation was made before this was known.
            snapshot.note_prefill(decode_row, uncached)
        return Sent(
            decode=snapshot.worker_ids[decode_row],
            prefill=None if prefill_row is None else snapshot.worker_ids[prefill_row],
            uncached_tokens=uncached,
            prompt_class=classify(uncached, self._rules.long_prefill_tokens),
            max_uncached_tokens=plan.max_uncached_tokens,
            reuse=placement.plan_reuse(computing),
            reservations=reservations,
        )

    def _count(self, sent: Sent) -> None:
        if self._ranges is not None:
            self._ranges.note(sent.uncached_tokens)
        kind = "local" if sent.prefill is None else "remote"
        self._metrics.decisions.labels(prefill=kind, prompt_class=sent.prompt_class).inc()
        self._metrics.reuse_decisions.labels(verdict=sent.reuse.verdict).inc()
        for role, reason in sent.pool_reasons.items():
            self._metrics.pool_choices.labels(role=role, reason=reason).inc()

    def _give_back(self, reservations: Mapping[Role, Reservation], ask: Ask) -> None:
        """Release what this try has made; what it was given is still its giver's."""
        self.release(*(held for held in reservations.values() if held != ask.kept))

    async def _release(self, reservation: Reservation, after_s: float = 0.0) -> None:
        if after_s:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), after_s)
        try:
            await self._ledger.release(reservation.pool, reservation.nonce)
        except RegistryError as error:
            # Its time ends it.
            log.info("reservation.kept nonce=%s error=%s", reservation.nonce, error)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        ending = asyncio.create_task(work)
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
