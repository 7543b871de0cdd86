"""AppConfig: every setting of a deployment, read once at the edge and frozen.

One YAML file of this shape describes a whole system; code inside gets plain values from it. Units are part of the
names. This is the only file that reads the environment.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from cluster.pools import PoolSpec, Role, prefill_boundaries
from deployments.config_errors import first_line
from deployments.config_kv import HandoffConfig, RegistryConfig, ReuseConfig
from deployments.config_pools import (
    LimitsConfig,
    PoolConfig,
    RequestClass,
    RoutingConfig,
    TokenRange,
    check_pools,
    default_pools,
)
from deployments.config_section import Section
from deployments.sizes import Bytes
from messages.errors import ConfigError
from messages.fault_plan import FaultRule, parse_faults
from messages.faults import Faults

__all__ = [
    "DEMO_MODEL_NAME",
    "DEMO_SOURCE",
    "FAULTS_VARIABLE",
    "AppConfig",
    "Dtype",
    "GatewayConfig",
    "LimitsConfig",
    "ModelConfig",
    "PoolConfig",
    "RequestClass",
    "Role",
    "RoutingConfig",
    "TokenRange",
    "cache_dir",
    "default_model_name",
    "demo_config",
    "environment_variable",
    "fault_rules",
    "faults",
    "load_config",
    "parse_config",
]

DEMO_SOURCE = "demo"
FAULTS_VARIABLE = "KVFERRY_FAULTS"
DEMO_MODEL_NAME = "smollm2-135m-instruct"

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

_MIB = 1024**2
_KV_BYTES_ON_CPU = 1024 * _MIB
_KV_SHARE = 0.9
"""On a GPU; activations and the allocator's gaps need the rest."""


class ModelConfig(Section):
    """One served model and the limits of the engine that runs it."""

    name: str = Field(min_length=1, description="Name that clients ask for. Default: made from `source`.")
    source: str = Field(min_length=1, description='"demo", a folder with a checkpoint, or a hub id.')
    dtype: Dtype = Field(
        default="auto",
        description="Of weights and KV. auto: bfloat16 on a GPU and on CPUs with avx512_bf16, else float32.",
    )
    block_size: int = Field(default=32, ge=1, le=1024, description="Tokens per KV block.")
    context_length: int | None = Field(
        default=None,
        ge=2,
        description="Most tokens of prompt and output together; models with longrope take their factors by it. "
        "null: what the model was made for.",
    )
    kv_memory_bytes: Bytes | None = Field(
        default=None,
        ge=1,
        description='KV memory per worker, in bytes or text ("512MiB"). Unused with kv_num_blocks. '
        "null: from kv_memory_share.",
    )
    kv_memory_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of the memory still free beside the weights that KV takes; the workers of one machine or "
        "GPU divide it. Unused with kv_memory_bytes. null: 0.9 on a GPU, 1 GiB on a CPU.",
    )
    kv_num_blocks: int | None = Field(
        default=None,
        ge=2,
        description="KV blocks per worker and group; goes before kv_memory_bytes. null: from the memory.",
    )
    max_batch_tokens: int = Field(default=512, ge=1, description="Most tokens that one step computes.")
    prefill_chunk_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most prompt tokens of one request in one step; running requests wait for no more than that. "
        "null: max_batch_tokens on workers that only prefill, half of it elsewhere.",
    )
    max_running: int = Field(default=64, ge=1, description="Most requests that one worker advances at a time.")
    fuse_layers: bool = Field(
        default=True,
        description="Whether decoder layers of known shape are computed in fewer, larger products, where that gives "
        "the same (CPU only for now). False: the model's own code.",
    )

    def chunk_tokens(self, role: Role, batch_tokens: int | None = None) -> int:
        """Most prompt tokens of one request in one step of a worker of `role`.

        Args:
            role: The worker's.
            batch_tokens: Most tokens of its steps; None: `max_batch_tokens`.
        """
        batch = self.max_batch_tokens if batch_tokens is None else batch_tokens
        if self.prefill_chunk_tokens is not None:
            return min(self.prefill_chunk_tokens, batch)
        return batch if role == "prefill" else max(1, batch // 2)

    def kv_bytes(self, *, on_gpu: bool) -> int | None:
        """KV memory of a worker; None when it is a share of what is free."""
        if self.kv_memory_bytes is not None or self.kv_memory_share is not None or on_gpu:
            return self.kv_memory_bytes
        return _KV_BYTES_ON_CPU

    def kv_share(self) -> float:
        """Share of the free memory that KV takes when it is not given in bytes."""
        return _KV_SHARE if self.kv_memory_share is None else self.kv_memory_share

    @model_validator(mode="before")
    @classmethod
    def _name_from_source(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("source"), str) and "name" not in data:
            return {**data, "name": default_model_name(data["source"])}
        return data

    @model_validator(mode="after")
    def _chunk_fits_a_step(self) -> Self:
        if (self.prefill_chunk_tokens or 0) > self.max_batch_tokens:
            raise ValueError("prefill_chunk_tokens must not be larger than max_batch_tokens")
        return self


class GatewayConfig(Section):
    """The doors."""

    host: str = Field(
        default="127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0 for every interface."
    )
    grpc_port: int = Field(default=9000, ge=1, le=65535, description="Port of the gRPC API.")
    http_port: int = Field(default=8000, ge=1, le=65535, description="Port of the OpenAI-compatible HTTP API.")
    drain_s: float = Field(
        default=10.0, ge=0, description="Running requests may go on for so long when the system stops."
    )
    num_cpus: float = Field(default=0.1, ge=0, description="CPUs that Ray books for a gateway.")

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        if self.grpc_port == self.http_port:
            raise ValueError(f"grpc_port and http_port are both {self.grpc_port}")
        return self


class AppConfig(Section):
    """A whole deployment, version 1."""

    version: Literal[1] = Field(description="Version of this format.")
    models: list[ModelConfig] = Field(description="Served models; exactly one for now.")
    pools: list[PoolConfig] = Field(default_factory=default_pools, description="Groups of workers.")
    routing: RoutingConfig = Field(default_factory=RoutingConfig, description="Who computes what.")
    registry: RegistryConfig = Field(default_factory=RegistryConfig, description="Who holds which block.")
    handoff: HandoffConfig = Field(default_factory=HandoffConfig, description="Moving blocks.")
    reuse: ReuseConfig = Field(default_factory=ReuseConfig, description="Prefixes that another worker holds.")
    limits: LimitsConfig = Field(default_factory=LimitsConfig, description="Limits on requests.")
    gateway: GatewayConfig = Field(default_factory=GatewayConfig, description="Where clients connect.")
    step_log_dir: str | None = Field(
        default=None, description="Folder for one JSONL file of step records per worker. null: none are written."
    )
    transport: Literal["nixl"] = Field(default="nixl", description="How block bytes move between workers.")

    @model_validator(mode="after")
    def _is_servable(self) -> Self:
        if len(self.models) != 1:
            raise ValueError(f"models: exactly one model is accepted for now, got {len(self.models)}")
        check_pools(self.pools, self.routing.long_prefill_tokens)
        if self.routing.thresholds == "adaptive" and prefill_boundaries(self.pool_specs()) is None:
            raise ValueError("routing.thresholds: adaptive needs pools whose prefill ranges follow one another")
        for pool in self.pools:
            if (pool.prefill_chunk_tokens or 0) > self.batch_tokens(pool):
                raise ValueError(f"pools: prefill_chunk_tokens of {pool.name} is larger than its max_batch_tokens")
        return self

    @property
    def model(self) -> ModelConfig:
        """The one served model."""
        return self.models[0]

    @property
    def local_prefill_max_tokens(self) -> int:
        """Uncached prompt tokens that decode computes itself."""
        limit = self.routing.local_prefill_max_tokens
        return self.model.block_size if limit is None else limit

    def pool(self, name: str) -> PoolConfig:
        """The pool called `name`.

        Raises:
            ConfigError: There is none.
        """
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise ConfigError(f'no pool is called "{name}"; there are {", ".join(p.name for p in self.pools)}')

    def pool_specs(self) -> tuple[PoolSpec, ...]:
        """The pools as routing sees them."""
        return tuple(pool.spec(self.routing.long_prefill_tokens) for pool in self.pools)

    def batch_tokens(self, pool: PoolConfig) -> int:
        """Most tokens that one step of a worker of `pool` computes."""
        return self.model.max_batch_tokens if pool.max_batch_tokens is None else pool.max_batch_tokens

    def chunk_tokens(self, pool: PoolConfig) -> int:
        """Most prompt tokens of one request in one step of a worker of `pool`."""
        if pool.prefill_chunk_tokens is not None:
            return pool.prefill_chunk_tokens
        return self.model.chunk_tokens(pool.role, self.batch_tokens(pool))


def default_model_name(source: str) -> str:
    """Name a model after where it comes from: the demo's own, a folder's last part, a hub id as it is."""
    if source == DEMO_SOURCE:
        return DEMO_MODEL_NAME
    is_path = source.startswith(("/", "./", "../", "~")) or Path(source).is_dir()
    return Path(source).expanduser().resolve().name if is_path else source


def fault_rules() -> tuple[FaultRule, ...]:
    """Faults to inject, for tests: the plan in $KVFERRY_FAULTS; see `kvferry faults`.

    Raises:
        ConfigError: The plan is wrong.
    """
    try:
        return parse_faults(os.environ.get(FAULTS_VARIABLE, ""))
    except ConfigError as error:
        raise ConfigError(f"{FAULTS_VARIABLE}: {error}") from None


def faults(pool: str | None = None) -> Faults:
    """What $KVFERRY_FAULTS plans for this process.

    Args:
        pool: The pool of this worker; None in any other process.

    Raises:
        ConfigError: The plan is wrong.
    """
    return Faults(fault_rules(), pool=pool)


def environment_variable(name: str) -> str | None:
    """A variable that the config names, such as the one with the registry's password; None when there is none."""
    return os.environ.get(name)


def cache_dir() -> Path:
    """Folder for fetched models: $KVFERRY_CACHE_DIR, else ~/.cache/kvferry."""
    configured = os.environ.get("KVFERRY_CACHE_DIR")
    return Path(configured) if configured else Path.home() / ".cache" / "kvferry"


def demo_config(*, grpc_port: int = 9000, http_port: int = 8000, num_gpus: float = 0.0) -> AppConfig:
    """One gateway, one prefill and one decode worker on this machine, embedded registry of two shards.

    Args:
        grpc_port: Port of the gRPC API.
        http_port: Port of the HTTP API.
        num_gpus: GPUs to book for each worker.
    """
    num_cores = len(os.sched_getaffinity(0))
    return AppConfig(
        version=1,
        models=[ModelConfig(name=DEMO_MODEL_NAME, source=DEMO_SOURCE)],
        pools=[
            # A demo sends one request at a time: decode is idle while prefill computes.
            PoolConfig(
                name="prefill", role="prefill", host="127.0.0.1", num_gpus=num_gpus, num_threads=max(1, num_cores)
            ),
            PoolConfig(name="decode", role="decode", host="127.0.0.1", num_gpus=num_gpus),
        ],
        gateway=GatewayConfig(grpc_port=grpc_port, http_port=http_port),
    )


def parse_config(data: Mapping[str, Any], *, origin: str = "config") -> AppConfig:
    """Check `data` and freeze it.

    Raises:
        ConfigError: A field is wrong; one line that starts with `origin` and names the field.
    """
    try:
        return AppConfig.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError(f"{origin}: {first_line(error, AppConfig)}") from None


def load_config(path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> AppConfig:
    """Read a YAML file, or start from the demo's settings without one, and apply `overrides`.

    Args:
        path: The file; None for the demo's settings.
        overrides: Dotted field to value, e.g. {"gateway.grpc_port": 9001, "models.0.dtype": "float32"}.

    Raises:
        ConfigError: The file cannot be read or a field is wrong; one line that names it.
    """
    data = demo_config().model_dump(mode="json") if path is None else _read_yaml(path)
    for field, value in (overrides or {}).items():
        _assign(data, field, value)
    return parse_config(data, origin=str(path) if path else "config")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected fields such as `version: 1` and `models:`, got {type(data).__name__}")
    return data


def _child(node: Any, part: str) -> Any:
    if isinstance(node, list):
        return node[int(part)]
    if node.get(part) is None:
        node[part] = {}
    return node[part]


def _assign(data: dict[str, Any], field: str, value: object) -> None:
    *parents, last = field.split(".")
    node: Any = data
    try:
        for part in parents:
            node = _child(node, part)
        node[int(last) if isinstance(node, list) else last] = value
    except (ValueError, IndexError, TypeError, AttributeError):
        raise ConfigError(f"cannot set {field}: the config has no such place") from None
