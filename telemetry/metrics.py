"""Every metric name in one file, and the objects behind them.

Workers send monotonic counters and gauges to the gateways in their heartbeats; a gateway exposes its own metrics and
those of all workers on one `/metrics` page, labelled by worker. A worker that is gone disappears from the page.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
REGISTRY_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class WorkerCounter(StrEnum):
    """Counters that a worker keeps; the value is the name in a heartbeat and, with `kvferry_`, on the page.

    What follows a slash is the label `reason` there.
    """

    PROMPT_TOKENS_COMPUTED = "prompt_tokens_computed_total"
    PROMPT_TOKENS_LOCAL_CACHE = "prompt_tokens_local_cache_total"
    PROMPT_TOKENS_REMOTE_CACHE = "prompt_tokens_remote_cache_total"
    PROMPT_TOKENS_TRANSFERRED = "prompt_tokens_transferred_total"
    GENERATION_TOKENS = "generation_tokens_total"
    PREEMPTIONS = "preemptions_total"
    STEPS = "engine_steps_total"
    PREFIX_QUERIES = "prefix_query_tokens_total"
    PREFIX_HITS = "prefix_hit_tokens_total"
    TRANSFER_BYTES = "transfer_bytes_total"
    TRANSFER_BLOCKS = "transfer_blocks_total"
    TRANSFER_SECONDS = "transfer_seconds_total"
    TRANSFER_FAILURES = "transfer_failures_total"
    REUSE_PULLS = "reuse_pulls_total"
    REUSE_FAILURES = "reuse_failures_total"
    LENDS = "lends_total"
    LENDS_REFUSED = "lends_refused_total"
    HANDSHAKES_LAYOUT = "handshake_failures_total/layout"
    """The two sides lay KV out differently."""
    HANDSHAKES_UNFIT = "handshake_failures_total/unfit"
    """What is offered does not fit what is wanted."""
    HANDSHAKES_UNKNOWN = "handshake_failures_total/unknown"
    """The owner holds no such hand-off any more."""
    HANDSHAKES_STALE = "handshake_failures_total/stale"
    """Another life, another block, or a later attempt."""
    HANDSHAKES_UNREACHABLE = "handshake_failures_total/unreachable"
    """The owner, or its memory, does not answer."""
    DIGEST_MISMATCHES = "digest_mismatch_total"
    RECOMPUTED_TOKENS = "transfer_recomputed_tokens_total"
    LEASES_GRANTED = "lease_granted_total"
    LEASES_EXTENDED = "lease_extended_total"
    LEASES_EXPIRED = "lease_expired_total"
    LATE_MESSAGES = "late_messages_rejected_total"
    REGISTRY_ERRORS = "registry_errors_total"
    REGISTRY_RESYNCS = "registry_resyncs_total"
    REGISTRY_GAPS = "registry_event_seq_gaps_total"
    REGISTRY_EPOCH_CHANGES = "registry_epoch_changes_total"
    REGISTRY_STALE_DROPPED = "registry_stale_entries_dropped_total"
    ABORTS = "aborts_total"


class WorkerGauge(StrEnum):
    """Values of a worker that go up and down; names as those of the counters, `kvferry_worker_` on the page."""

    REGISTRY_DEGRADED = "registry_degraded"
    PUBLISH_QUEUE_DEPTH = "publish_queue_depth"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupGauge:
    """Blocks of one KV group on one worker."""

    name: str
    total: int
    free: int
    cached: int
    referenced: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSample:
    """The newest heartbeat of one worker."""

    worker_id: str
    pool: str
    role: str
    groups: tuple[GroupGauge, ...] = ()
    running: int = 0
    waiting: int = 0
    handoffs: int = 0
    queued_prefill_tokens: int = 0
    counters: Mapping[str, float] = field(default_factory=dict)
    """By the names of WorkerCounter and WorkerGauge."""


class WorkerSamples(Protocol):
    """Where the page finds the newest heartbeats."""

    def samples(self) -> list[WorkerSample]:
        """One per live worker."""
        ...


class WorkerCollector:
    """Turns heartbeats into Prometheus families at scrape time."""

    def __init__(self, source: WorkerSamples) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """Families of all live workers."""
        samples = self._source.samples()
        labels = ["worker", "pool", "role"]
        blocks = GaugeMetricFamily("kvferry_kv_blocks", "KV blocks by state.", labels=[*labels, "group", "state"])
        gauges = {
            name: GaugeMetricFamily(f"kvferry_worker_{name}", text, labels=labels)
            for name, text in (
                ("running", "Requests that advance in steps."),
                ("waiting", "Requests that wait for blocks or for their KV."),
                ("handoffs", "Hand-offs whose blocks are held."),
                ("queued_prefill_tokens", "Prompt tokens still to be computed."),
            )
        }
        counters = _counter_families(labels)
        reported = {
            name: GaugeMetricFamily(f"kvferry_worker_{name}", text, labels=labels)
            for name, text in (
                (WorkerGauge.REGISTRY_DEGRADED, "1 while a shard of the registry does not answer the worker."),
                (WorkerGauge.PUBLISH_QUEUE_DEPTH, "Statements about blocks that wait for the registry."),
            )
        }
        for sample in samples:
            base = [sample.worker_id, sample.pool, sample.role]
            for group in sample.groups:
                for state in ("total", "free", "cached", "referenced"):
                    blocks.add_metric([*base, group.name, state], getattr(group, state))
            for name, family in gauges.items():
                family.add_metric(base, getattr(sample, name))
            for counter in WorkerCounter:
                name, _, reason = counter.partition("/")
                own = [*base, reason] if reason else base
                counters[name].add_metric(own, sample.counters.get(counter, 0.0))
            for gauge, gauge_family in reported.items():
                gauge_family.add_metric(base, sample.counters.get(gauge, 0.0))
        yield blocks
        yield from gauges.values()
        yield from reported.values()
        yield from counters.values()


def _counter_families(labels: list[str]) -> dict[str, CounterMetricFamily]:
    families = {}
    for counter in WorkerCounter:
        name, _, reason = counter.partition("/")
        own = [*labels, "reason"] if reason else labels
        families[name] = CounterMetricFamily(
            f"kvferry_{name.removesuffix('_total')}", f"Worker counter {name}.", labels=own
        )
    return families


class LedgerCounts(Protocol):
    """What a ledger of reservations says of itself."""

    @property
    def is_degraded(self) -> bool:
        """Whether this gateway reserves by its own view alone."""
        ...

    @property
    def num_open(self) -> int:
        """Reservations that live."""
        ...

    @property
    def num_expired(self) -> int:
        """Those that their time has ended."""
        ...

    @property
    def num_released(self) -> int:
        """Those that were given back."""
        ...

    @property
    def num_dropped(self) -> int:
        """Those that have ended with their worker."""
        ...


class LedgerCollector:
    """Turns a ledger's counts into Prometheus families at scrape time."""

    def __init__(self, source: LedgerCounts) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """What is open, how the others ended, and whether the ledger is shared."""
        source = self._source
        yield GaugeMetricFamily("kvferry_reservations_open", "Reservations that live.", value=source.num_open)
        degraded = "1 while load is reserved by this gateway's own view alone."
        yield GaugeMetricFamily("kvferry_ledger_degraded", degraded, value=float(source.is_degraded))
        ended = CounterMetricFamily("kvferry_reservations_ended", "Reservations that are over.", labels=["by"])
        ended.add_metric(["expired"], source.num_expired)
        ended.add_metric(["released"], source.num_released)
        ended.add_metric(["dropped"], source.num_dropped)
        yield ended


class RegistryMetrics:
    """What a gateway sees of the registry; made before the registry, shown by `register`."""

    def __init__(self) -> None:
        self.errors = Counter(
            "kvferry_gateway_registry_errors",
            "Commands that a shard did not carry out.",
            ["shard", "operation", "reason"],
            registry=None,
        )
        self.seconds = Histogram(
            "kvferry_registry_seconds",
            "Time of one pipeline.",
            ["shard", "operation"],
            registry=None,
            buckets=REGISTRY_BUCKETS,
        )
        self.degraded = Gauge(
            "kvferry_registry_degraded", "1 while a shard of the registry does not answer.", registry=None
        )
        self.lookups = Counter(
            "kvferry_registry_lookups",
            "Questions who holds a prompt's blocks: hit, miss, or unknown when a shard did not answer.",
            ["result"],
            registry=None,
        )
        self.hit_blocks = Counter(
            "kvferry_registry_hit_blocks", "Blocks of the longest prefix that lookups found.", registry=None
        )
        self.stale = Counter(
            "kvferry_gateway_registry_stale_entries_dropped",
            "Claims of lives that have ended: met and ignored by a lookup, or removed by the sweep.",
            ["by"],
            registry=None,
        )

    def register(self, registry: CollectorRegistry) -> None:
        """Show these metrics on the page of `registry`."""
        for metric in (self.errors, self.seconds, self.degraded, self.lookups, self.hit_blocks, self.stale):
            registry.register(metric)


class GatewayMetrics:
    """What a gateway itself counts, and the page's registry."""

    def __init__(self, workers: WorkerSamples) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(WorkerCollector(workers))
        self.requests = Counter(
            "kvferry_requests", "Finished requests by outcome.", ["model", "code"], registry=self.registry
        )
        self.in_flight = Gauge("kvferry_requests_in_flight", "Requests between door and end.", registry=self.registry)
        self.waiting = Gauge(
            "kvferry_requests_waiting", "Requests that wait until they may begin.", registry=self.registry
        )
        self.decisions = Counter(
            "kvferry_router_decisions",
            "Where prompts were computed.",
            ["prefill", "prompt_class"],
            registry=self.registry,
        )
        self.reuse_decisions = Counter(
            "kvferry_router_reuse",
            "What was decided about prefixes that another worker holds: nothing held, compute, or fetch.",
            ["verdict"],
            registry=self.registry,
        )
        self.pool_choices = Counter(
            "kvferry_router_pool_choices",
            "Why workers of these pools might be chosen: own ones, or others because those were over their line, full "
            "or without a worker, or because the request had waited too long.",
            ["role", "reason"],
            registry=self.registry,
        )
        self.migrations = Counter(
            "kvferry_migrations",
            "Requests that went on elsewhere after a worker failed them: new before their first token, else ongoing.",
            ["request"],
            registry=self.registry,
        )
        self.ttft = Histogram(
            "kvferry_ttft_seconds", "Time to token 1.", registry=self.registry, buckets=SECONDS_BUCKETS
        )
        self.e2e = Histogram("kvferry_e2e_seconds", "Time to the end.", registry=self.registry, buckets=SECONDS_BUCKETS)
        self.prompt_tokens = Counter("kvferry_prompt_tokens", "Prompt tokens taken in.", registry=self.registry)
        self.cached_tokens = Counter("kvferry_cached_tokens", "Prompt tokens reused.", registry=self.registry)
        self.output_tokens = Counter("kvferry_output_tokens", "Tokens sent to clients.", registry=self.registry)
