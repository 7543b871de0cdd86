"""Where one request runs: the decode worker first, because it needs room for the KV, then who computes the prompt.

The prompt is computed on the decode worker when little of it is uncached there, or when that is predicted to be sooner
for everybody; otherwise the workers that only prefill are ranked. Unified workers keep their prefills to themselves:
sending one to another of them gains nothing. A ranking has several candidates, each with what pending load adds to its
cost, so that the ledger, which knows what was placed meanwhile, can choose. Which pools may be used is a mask's matter.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from cluster.policies import POLICIES, PlacementDemand, PolicyName, PolicyRules, Scores, Stage
from cluster.prediction import PromptTimes, handoff_ms, prompt_times, queued_delay_ms
from cluster.reuse import Holder, ReusePlan, ReuseRules, WorkerRates, best_first, plan_reuse
from cluster.reuse_columns import cover
from cluster.snapshot import Bools, Floats, Ints, Snapshot
from messages.errors import Unavailable
from messages.reservations import Candidate, Need

LocalReason = Literal["few_tokens", "sooner_here", "no_prefill_worker"]
RemoteReason = Literal["sooner_there", "refused_here"]

_CHANGED = "workers have joined or left since"
_GOLDEN_RATIO = 0.6180339887498949
_NUM_SHARES = 1 << 16
_SHARES = np.modf(np.arange(_NUM_SHARES) * _GOLDEN_RATIO)[0]
"""Spread evenly over [0, 1), and so is every run of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRules:
    """The configured side of a placement."""

    policy: PolicyName = "predicted_latency"
    costs: PolicyRules = field(default_factory=PolicyRules)
    local_prefill_max_tokens: int = 32
    """A decode worker always computes up to so many uncached prompt tokens itself, and is asked for more only where
    that is predicted to be clearly better."""
    prefills_on_decode: bool = True
    """Whether a pure decode worker may be asked for more than that at all."""
    hysteresis: float = 0.25
    """Part by which the unusual place for a prompt must be better than the usual one: a pure decode worker is unusual,
    a unified one usual."""
    hysteresis_ms: float = 50.0
    """The same in milliseconds; only against pure decode workers."""
    num_candidates: int = 16
    """Most rows of a ranking."""
    spread: float = 0.05
    """Where there are more rows than candidates, those that cost at most so much more than others are their equals, and
    different requests are given different ones of them."""
    reuse: ReuseRules | None = None
    """When prefixes move between workers; None: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Rows that may be chosen, cheapest first, never empty, and what the policy said of all rows."""

    rows: tuple[int, ...]
    scores: Scores = field(compare=False, repr=False)
    placement: "Placement" = field(compare=False, repr=False)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The rows as the ledger takes them; made anew each time."""
        return self.placement.candidates(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """Who computes the prompt: the decode worker itself, or one of a ranking."""

    reason: LocalReason | RemoteReason
    ranking: Ranking | None = None
    """None: the decode worker itself."""
    local_ms: float | None = None
    """Predicted for the decode worker, delay of others included; None: it was not needed to decide."""
    remote_ms: float | None = None
    """Predicted for the best other one, hand-off included; None: as above, or there is none."""
    max_uncached_tokens: int | None = None
    """The decode worker must refuse the prompt when more turn out to be uncached there; None: it takes it anyway."""

    @property
    def is_local(self) -> bool:
        """Whether the decode worker computes the prompt."""
        return self.ranking is None


class Placement:
    """One request against one snapshot, until a worker joins or leaves.

    Args:
        snapshot: The workers.
        demand: What the request needs.
        matched_tokens: Leading prompt tokens that each row holds, (n,).
        rules: What is configured.
    """

    def __init__(
        self, snapshot: Snapshot, demand: PlacementDemand, matched_tokens: Ints, rules: PlacementRules
    ) -> None:
        coverage = cover(snapshot, demand.prompt_tokens, matched_tokens, rules.reuse)
        self.snapshot = snapshot
        self._num_changes = snapshot.num_changes
        self.matched_tokens = matched_tokens
        self.remaining_tokens = coverage.remaining_tokens
        """Prompt tokens that each row would compute after what it fetches, (n,)."""
        self._rules = rules
        self._demand = demand
        self._work_tokens = coverage.work_tokens
        self._times: PromptTimes | None = None

    def rank_decode(self, allowed: Bools) -> Ranking:
        """Compare the workers that decode.

        Args:
            allowed: Rows that may be chosen, (n,).

        Raises:
            Unavailable: None of them can decode.
        """
        able = self._fitting(allowed & self.able("decode"))
        if not able.any():
            raise Unavailable("no decode worker takes requests now")
        return self._rank(self.scores("decode"), able, self.need(decodes=True))

    def plan_prefill(self, decode_row: int, allowed: Bools, *, force_remote: bool = False) -> PrefillPlan:
        """Decide who computes the prompt of a request that decodes on a row.

        Args:
            decode_row: The chosen decode worker.
            allowed: Rows that may be chosen to prefill for it, (n,).
            force_remote: It has refused to compute the prompt itself.

        Raises:
            Unavailable: It must not compute the prompt, and nobody else can.
        """
        remaining = int(self.remaining_tokens[decode_row])
        limit = self._rules.local_prefill_max_tokens
        prefills_freely = bool(self.snapshot.columns.can_prefill[decode_row])
        if remaining <= limit and not force_remote:
            return PrefillPlan(reason="few_tokens", max_uncached_tokens=None if prefills_freely else limit)
        able = allowed & self.able("prefill", decode_row)
        if not able.any():
            if not prefills_freely:
                raise Unavailable("no prefill worker takes requests now")
            return PrefillPlan(reason="no_prefill_worker")
        ranking = self._rank(self.scores("prefill", decode_row), able, self.need())
        local_ms, remote_ms = self._local_ms(decode_row), self._remote_ms(decode_row, ranking.rows[0])
        if force_remote:
            return PrefillPlan(reason="refused_here", ranking=ranking, remote_ms=remote_ms)
        if not self._is_sooner_here(local_ms, remote_ms, is_usual=prefills_freely):
            return PrefillPlan(reason="sooner_there", ranking=ranking, local_ms=local_ms, remote_ms=remote_ms)
        most = None if prefills_freely else remaining
        return PrefillPlan(reason="sooner_here", local_ms=local_ms, remote_ms=remote_ms, max_uncached_tokens=most)

    def plan_reuse(self, row: int) -> ReusePlan:
        """What the worker that computes the prompt fetches before, and from whom."""
        rules, columns = self._rules.reuse, self.snapshot.columns
        if rules is None:
            return ReusePlan()
        rows = np.flatnonzero(self._shares_layout(row) & (self.matched_tokens > self.matched_tokens[row]))
        if len(rows) > rules.max_sources:
            # Those that hold most; which of equals is settled by their load below.
            least = np.partition(self.matched_tokens[rows], -rules.max_sources)[-rules.max_sources]
            rows = rows[self.matched_tokens[rows] >= least]
        holders = [
            Holder(
                worker_id=self.snapshot.worker_ids[each],
                num_tokens=int(self.matched_tokens[each]),
                load=float(columns.step_ms[each] + columns.queue_ms[each]),
            )
            for each in rows.tolist()
        ]
        rates = WorkerRates(
            prefill_tokens_s=float(columns.prefill_tokens_s[row]),
            transfer_bytes_s=float(columns.transfer_bytes_s[row]),
            groups=self.snapshot.layouts[columns.fingerprint[row]],
        )
        have = int(self.matched_tokens[row])
        return plan_reuse(have, best_first(holders), self._demand.prompt_tokens, rates, rules)

    def scores(self, stage: Stage, decode_row: int | None = None) -> Scores:
        """What the policy says of every row.

        Args:
            stage: Which of the two workers is to be chosen.
            decode_row: At stage prefill: who will read the blocks.
        """
        assert self.is_current, _CHANGED
        policy = POLICIES[self._rules.policy]
        asked = self._demand
        # Made anew, field by field: `replace` takes as long as several columns do.
        demand = PlacementDemand(
            prompt_tokens=asked.prompt_tokens,
            output_tokens=asked.output_tokens,
            stage=stage,
            transfer_ms=0.0 if decode_row is None else self._transfer_ms(decode_row),
            work_tokens=self._work_tokens,
            times=self._prompt_times(),
            seed=asked.seed,
        )
        return policy(self.snapshot, demand, self.matched_tokens, self._rules.costs)

    def candidates(self, ranking: Ranking) -> tuple[Candidate, ...]:
        """A ranking as the ledger takes it, which knows what is pending."""
        assert self.is_current, _CHANGED
        snapshot, scores, rows = self.snapshot, ranking.scores, ranking.rows
        arrays = (scores.cost, scores.per_token, scores.per_request, scores.per_lacking_token, self._room_tokens())
        values = zip(*(array[list(rows)].tolist() for array in arrays), strict=True)
        return tuple(
            Candidate(
                worker_id=snapshot.worker_ids[row],
                incarnation=snapshot.incarnations[row],
                cost=cost,
                cost_per_token=per_token,
                cost_per_request=per_request,
                cost_per_lacking_token=per_lacking_token,
                room_tokens=int(room_tokens),
                admitted=snapshot.admitted[row],
            )
            for row, (cost, per_token, per_request, per_lacking_token, room_tokens) in zip(rows, values, strict=True)
        )

    def need(self, *, prefills_at: int | None = None, decodes: bool = False) -> Need:
        """What the request takes of a worker, matched blocks included: candidates count them as room.

        Args:
            prefills_at: Row that computes the prompt, if that is the worker in question.
            decodes: Whether it generates there.
        """
        output = self._rules.costs.horizon(self._demand) if decodes else 0
        computed = 0 if prefills_at is None else int(self.remaining_tokens[prefills_at])
        return Need(prefill_tokens=computed, kv_tokens=self._demand.prompt_tokens + output)

    def total_cost(self, scores: Scores, need: Need) -> Floats:
        """Cost of every row, (n,), lacking room included, as the ledger sees it when nothing is pending."""
        lacking = np.maximum(need.kv_tokens - self._room_tokens(), 0.0)
        return scores.cost + scores.per_lacking_token * lacking

    def able(self, stage: Stage, decode_row: int | None = None) -> Bools:
        """Rows whose role is that of a stage, (n,); at stage prefill those whose blocks the decode worker can read."""
        columns = self.snapshot.columns
        if stage == "decode":
            return columns.can_decode
        if decode_row is None:
            return columns.only_prefills
        return columns.only_prefills & self._shares_layout(decode_row)

    @property
    def is_current(self) -> bool:
        """Whether row numbers are still what they were; if not, make another placement."""
        return self.snapshot.num_changes == self._num_changes

    @property
    def policy(self) -> PolicyName:
        """Which one compares the rows."""
        return self._rules.policy

    def _rank(self, scores: Scores, allowed: Bools, need: Need) -> Ranking:
        able = np.flatnonzero(allowed)
        order = self._cheapest(self.total_cost(scores, need)[able])
        return Ranking(rows=tuple(able[order].tolist()), scores=scores, placement=self)

    def _room_tokens(self) -> Floats:
        """Room for the request's KV, (n,): what it finds there needs none."""
        return self.snapshot.columns.free_tokens + self.matched_tokens

    def _cheapest(self, cost: Floats) -> Ints:
        """Where the least costs are, in order; of equal ones those whose turn it is by the request's seed."""
        most, shares = self._rules.num_candidates, _shares(self._demand.seed, len(cost))
        if len(cost) <= most:
            return np.lexsort((shares, cost))
        # One unit more, so that rows that cost nothing are told apart too.
        blurred = (cost + 1.0) * (1.0 + self._rules.spread * shares)
        found = np.argpartition(blurred, most - 1)[:most]
        cheapest = int(cost.argmin())
        if cheapest not in found.tolist():
            found[-1] = cheapest
        return found[np.lexsort((shares[found], cost[found]))]

    def _fitting(self, allowed: Bools) -> Bools:
        """Rows whose whole memory is large enough; all where none is, since the worker says best what is too long."""
        fits = allowed & (self.snapshot.columns.total_tokens > self._demand.prompt_tokens)
        return fits if fits.any() else allowed

    def _shares_layout(self, row: int) -> Bools:
        fingerprint = self.snapshot.columns.fingerprint
        shares: Bools = fingerprint == fingerprint[row]
        return shares

    def _local_ms(self, decode_row: int) -> float:
        times, columns = self._prompt_times(), self.snapshot.columns
        victims = self._rules.costs.delay_weight * columns.decoding[decode_row]
        return float(times.ttft_ms[decode_row] + victims * times.delay_ms[decode_row])

    def _remote_ms(self, decode_row: int, prefill_row: int) -> float:
        times = self._prompt_times()
        handoff = handoff_ms(
            self._transfer_ms(decode_row), times.compute_ms[prefill_row], times.last_chunk[prefill_row]
        )
        # What is queued on the decode worker holds up the tokens after the first.
        delay_ms = queued_delay_ms(self.snapshot.columns, self._rules.costs.horizon(self._demand) - 1)[decode_row]
        return float(times.ttft_ms[prefill_row] + handoff + delay_ms)

    def _is_sooner_here(self, local_ms: float, remote_ms: float, *, is_usual: bool) -> bool:
        more = 1.0 + self._rules.hysteresis
        if is_usual:
            return local_ms <= remote_ms * more
        if not self._rules.prefills_on_decode:
            return False
        return local_ms * more + self._rules.hysteresis_ms < remote_ms

    def _transfer_ms(self, decode_row: int) -> float:
        """Time in which the decode worker reads what it lacks of the prompt."""
        columns = self.snapshot.columns
        layout = WorkerRates(groups=self.snapshot.layouts[columns.fingerprint[decode_row]])
        size_bytes = layout.bytes_between(int(self.matched_tokens[decode_row]), self._demand.prompt_tokens)
        return size_bytes * 1e3 / float(columns.transfer_bytes_s[decode_row])

    def _prompt_times(self) -> PromptTimes:
        if self._times is None:
            self._times = prompt_times(self.snapshot.columns, self._demand.prompt_tokens, self._work_tokens)
        return self._times


def _shares(seed: int, length: int) -> Floats:
    """A share in [0, 1) for each row, another one for another seed."""
    first = seed % (_NUM_SHARES // 2)
    return _SHARES[first : first + length] if first + length <= _NUM_SHARES else np.resize(_SHARES, length)
