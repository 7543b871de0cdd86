"""The part of the config that is about pools of workers: who they are, which requests they take, how they step."""

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from cluster.policies import PolicyName
from cluster.pools import PoolSpec, Role, first_gap
from deployments.config_section import Section

RequestClass = Literal["any", "short", "long"]


class TokenRange(Section):
    """How many tokens; both ends belong to it."""

    min: int = Field(default=0, ge=0, description="Fewest tokens.")
    max: int | None = Field(default=None, ge=1, description="Most tokens. null: no limit.")

    @model_validator(mode="after")
    def _is_not_empty(self) -> Self:
        if self.max is not None and self.min > self.max:
            raise ValueError(f"min must not be larger than max, got {self.min} and {self.max}")
        return self


class PoolConfig(Section):
    """A group of equal workers: one Serve deployment."""

    name: str = Field(pattern=r"^[a-z][a-z0-9-]{0,39}$", description="Lower-case letters, digits and dashes.")
    role: Role = Field(description="prefill, decode, or unified (both).")
    replicas: int = Field(default=1, ge=1, le=1000, description="Workers in the pool.")
    requests: RequestClass = Field(
        default="any",
        description="Which prefills the pool takes, by tokens still uncached; see routing.long_prefill_tokens.",
    )
    prefill_tokens: TokenRange | None = Field(
        default=None,
        description="Which prefills the pool takes, by prompt tokens still uncached; instead of `requests`. null: all.",
    )
    context_tokens: TokenRange | None = Field(
        default=None,
        description="Which requests the pool takes, by tokens of the whole prompt, cached or not; in a pool that "
        "decodes it is their KV that stays. Not together with `requests`. null: all.",
    )
    max_batch_tokens: int | None = Field(
        default=None, ge=1, description="Most tokens that one step of its workers computes. null: the model's."
    )
    prefill_chunk_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most prompt tokens of one request in one step of its workers. null: the model's, as far as a "
        "step holds it.",
    )
    max_queue_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Prompt tokens that may wait at one worker; when all of a pool have so many, more are refused or "
        "go to other pools. null: no bound; a queue of routing.long_max_wait_s counts as filled.",
    )
    num_threads: int | None = Field(
        default=None,
        ge=1,
        description="CPU threads of a worker's step. null: size of cpu_affinity, else half of the cores.",
    )
    cpu_affinity: list[int] | None = Field(
        default=None, min_length=1, description="Cores a worker may run on. null: all."
    )
    nice: int = Field(default=0, ge=0, le=19, description="Scheduling niceness of a worker; higher gives way.")
    host: str | None = Field(
        default=None, description="Address workers listen on, and are reached at. null: the node's."
    )
    num_cpus: float = Field(default=0.1, ge=0, description="CPUs that Ray books per worker; books, does not limit.")
    num_gpus: float = Field(
        default=0.0, ge=0, description="GPUs that Ray books per worker. 0: the worker computes on the CPU."
    )
    resources: dict[str, float] = Field(default_factory=dict, description="Custom Ray resources per worker.")

    @model_validator(mode="after")
    def _says_once_what_it_takes(self) -> Self:
        ranges = [name for name in ("prefill_tokens", "context_tokens") if getattr(self, name) is not None]
        if self.requests != "any" and ranges:
            raise ValueError(f"requests: {self.requests} and {ranges[0]} are two ways to say it; give one")
        if self.role == "decode" and self.prefill_tokens is not None:
            raise ValueError("prefill_tokens has no meaning in a pool that only decodes; use context_tokens")
        return self

    def threads(self, num_cores: int) -> int:
        """CPU threads of one worker on a node with `num_cores` cores."""
        if self.num_threads is not None:
            return self.num_threads
        return len(self.cpu_affinity) if self.cpu_affinity else max(1, num_cores // 2)

    def has_role(self, role: Literal["prefill", "decode"]) -> bool:
        """Whether workers of this pool do `role`."""
        return self.role in (role, "unified")

    def spec(self, long_prefill_tokens: int) -> PoolSpec:
        """The pool as routing sees it.

        Args:
            long_prefill_tokens: The most uncached prompt tokens of a short request.
        """
        classes = {"any": (0, None), "short": (0, long_prefill_tokens), "long": (long_prefill_tokens + 1, None)}
        least, most = classes[self.requests]
        if self.prefill_tokens is not None:
            least, most = self.prefill_tokens.min, self.prefill_tokens.max
        context = self.context_tokens or TokenRange()
        return PoolSpec(
            name=self.name,
            role=self.role,
            min_prefill_tokens=least,
            max_prefill_tokens=most,
            min_context_tokens=context.min,
            max_context_tokens=context.max,
            max_queue_tokens=self.max_queue_tokens,
        )


class RoutingConfig(Section):
    """Thresholds of the router."""

    long_prefill_tokens: int = Field(
        default=2048, ge=1, description="A request with more uncached prompt tokens than this is long, else short."
    )
    local_prefill_max_tokens: int | None = Field(
        default=None,
        ge=0,
        description="Uncached prompt tokens up to which decode computes them itself. null: one block.",
    )
    prefill_on_decode: bool = Field(
        default=True,
        description="Whether decode computes more than local_prefill_max_tokens itself where that is predicted to be "
        "clearly sooner, the delay of its other requests included.",
    )
    policy: PolicyName = Field(
        default="predicted_latency", description="How the workers that may take a request are compared."
    )
    spill_enter: float = Field(
        default=0.8, gt=0, le=1, description="From this load on, a pool's requests may go to other pools."
    )
    spill_leave: float = Field(default=0.5, ge=0, lt=1, description="Down to this load they still may.")
    long_max_wait_s: float = Field(
        default=10.0,
        gt=0,
        description="Every request should begin within this; after half of it, it may go to any pool.",
    )
    thresholds: Literal["fixed", "adaptive"] = Field(
        default="fixed",
        description="fixed: the pools' prefill ranges stay as they are here. adaptive: they move so that the pools "
        "carry equal loads for the workers they have; they must follow one another.",
    )

    @model_validator(mode="after")
    def _spills_with_hysteresis(self) -> Self:
        if self.spill_leave >= self.spill_enter:
            raise ValueError("spill_leave must be less than spill_enter")
        return self


class LimitsConfig(Section):
    """What one request may ask for and how much may wait."""

    max_queue: int = Field(default=256, ge=1, description="Requests in the gateway at a time; one more is refused.")
    max_running_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens of prompt and counted output that a gateway serves at a time; more wait. null: any number. "
        "Requests whose prompts share a prefix share its KV, which this does not know.",
    )
    max_waiting_tokens: int | None = Field(
        default=None, ge=1, description="Such tokens that may wait in one gateway. null: as many as may be served."
    )
    counted_output_tokens: int = Field(
        default=256,
        ge=0,
        description="Output tokens that are counted for a request before they are there, if it may have so many.",
    )
    max_buffered_events: int = Field(
        default=1024, ge=1, description="Token events that may wait for a slow client before its request is aborted."
    )
    request_timeout_s: float = Field(default=600.0, gt=0, description="Deadline of a request that names none.")


def default_pools() -> list[PoolConfig]:
    """One worker that prefills and one that decodes."""
    return [PoolConfig(name="prefill", role="prefill"), PoolConfig(name="decode", role="decode")]


def check_pools(pools: Sequence[PoolConfig], long_prefill_tokens: int) -> None:
    """See that together they serve requests of every length.

    Raises:
        ValueError: They do not; it says which request nobody takes.
    """
    names = [pool.name for pool in pools]
    if len(set(names)) != len(names):
        raise ValueError("pools: two pools have the same name")
    if not any(pool.has_role("decode") for pool in pools):
        raise ValueError("pools: none decodes; add one with role decode or unified")
    for kind in ("short", "long"):
        if not any(pool.has_role("prefill") and pool.requests in ("any", kind) for pool in pools):
            raise ValueError(f"pools: none takes {kind} prefills; add one with requests: any or {kind}")
    gap = first_gap([pool.spec(long_prefill_tokens) for pool in pools])
    if gap is not None:
        what, uncached, context = gap
        raise ValueError(
            f"pools: none takes the {what} of a prompt of {context} tokens with {uncached} of them uncached; "
            "widen prefill_tokens or context_tokens"
        )
