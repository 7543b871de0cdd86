"""Makes the registry that a config describes, the same for workers, gateways and the command line, and tends it."""

import asyncio
import random
from pathlib import Path

from deployments.config import environment_variable
from deployments.config_kv import RegistryConfig
from kv_store.redis_ledger import RedisLedger
from kv_store.registry.connection import ShardAccess
from kv_store.registry.protocol import PrefixHits, Registry
from kv_store.registry.redis import RedisRegistry
from kv_store.registry.shard import ShardFailure, ShardHooks, ShardLimits
from messages.errors import ConfigError
from telemetry.metrics import RegistryMetrics

TEND_PERIOD_S = 1.0


def make_registry(config: RegistryConfig, hooks: ShardHooks | None = None) -> RedisRegistry:
    """Make a registry that connects when it is used.

    Args:
        config: With at least one URL.
        hooks: Who hears of what shards do.

    Raises:
        ConfigError: No URL, a bad one, or the password is not where the config says.
    """
    return RedisRegistry(
        config.urls,
        config.namespace,
        limits=ShardLimits(timeout_s=config.timeout_s),
        entry_ttl_s=config.entry_ttl_s,
        access=_access(config),
        is_cluster=config.cluster,
        hooks=hooks,
    )


def make_ledger(config: RegistryConfig) -> RedisLedger:
    """Make the ledger of all gateways, on the registry's servers; it connects when it is used.

    Raises:
        ConfigError: As for `make_registry`.
    """
    return RedisLedger(config.urls, config.namespace, access=_access(config), is_cluster=config.cluster)


def hooks_into(metrics: RegistryMetrics) -> ShardHooks:
    """Let `metrics` hear of what the registry does."""

    def note_failure(failure: ShardFailure) -> None:
        labels = {"shard": failure.shard, "operation": failure.operation, "reason": failure.reason}
        metrics.errors.labels(**labels).inc(failure.num_commands)

    def note_answer(shard: str, operation: str, seconds: float) -> None:
        metrics.seconds.labels(shard=shard, operation=operation).observe(seconds)

    def note_lookup(hits: PrefixHits) -> None:
        result = "hit" if hits.by_worker else "unknown" if hits.unknown else "miss"
        metrics.lookups.labels(result=result).inc()
        metrics.hit_blocks.inc(max(hits.by_worker.values(), default=0))

    def note_stale(by: str, num_claims: int) -> None:
        metrics.stale.labels(by=by).inc(num_claims)

    return ShardHooks(on_failure=note_failure, on_answer=note_answer, on_lookup=note_lookup, on_stale=note_stale)


async def tend(registry: Registry) -> None:
    """Take part in cleaning a registry up until cancelled."""
    while True:
        await asyncio.sleep(TEND_PERIOD_S * random.uniform(0.8, 1.2))  # noqa: S311 - jitter
        await registry.tend()


def _access(config: RegistryConfig) -> ShardAccess:
    return ShardAccess(
        username=config.username,
        password=_password(config),
        ca_file=config.ca_file,
        certificate_file=config.certificate_file,
        key_file=config.key_file,
        check_hostname=config.check_hostname,
    )


def _password(config: RegistryConfig) -> str | None:
    if config.password_file is not None:
        try:
            # Editors and `echo` end a file with a line break, which no password does.
            return Path(config.password_file).read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"registry.password_file {config.password_file} cannot be read") from error
    if config.password_env is not None:
        password = environment_variable(config.password_env)
        if password is None:
            raise ConfigError(f"registry.password_env: the environment has no variable {config.password_env}")
        return password
    return None
