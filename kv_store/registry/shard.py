"""One Redis of the registry: a pipeline goes in, a reply or None per command comes out, nothing is raised.

A shard that fails is left alone for a moment, so that a dead one does not slow every lookup down.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from kv_store.registry import scripts
from kv_store.registry.scripts import Command

log = logging.getLogger(__name__)

Reply = object
"""What a shard answered; None stands for no answer, so no command used here may answer nil."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFailure:
    """Commands that one shard did not carry out; their effect is lost or their answer unknown."""

    shard: str
    operation: str
    reason: str
    """timeout, connection, refused (the shard answered with an error) or skipped (it failed a moment ago)."""
    num_commands: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLimits:
    """Bounds on the use of one shard."""

    timeout_s: float = 0.5
    """Longest wait for one pipeline, connecting included."""
    cooldown_s: float = 1.0
    """How long a shard that failed is left alone before one caller tries it again."""
    max_connections: int = 16
    """Pipelines in flight at once; more wait."""


class CircuitBreaker:
    """Closed, or open until a time at which one caller may probe."""

    def __init__(self, cooldown_s: float) -> None:
        self._cooldown_s = cooldown_s
        self._retry_at_s: float | None = None

    @property
    def is_closed(self) -> bool:
        """Whether the last thing known is a success."""
        return self._retry_at_s is None

    def allows(self, now_s: float) -> bool:
        """Say whether to try; of several callers after the cooldown only the first hears yes."""
        if self._retry_at_s is None:
            return True
        if now_s < self._retry_at_s:
            return False
        self._retry_at_s = now_s + self._cooldown_s
        return True

    def succeeded(self) -> None:
        """Let everybody through."""
        self._retry_at_s = None

    def failed(self, now_s: float) -> None:
        """Let nobody through until the cooldown is over."""
        self._retry_at_s = now_s + self._cooldown_s


class RegistryShard:
    """Connections to one Redis, used from one event loop."""

    def __init__(self, name: str, url: str, limits: ShardLimits, on_failure: Callable[[ShardFailure], None]) -> None:
        self.name = name
        self._limits = limits
        self._on_failure = on_failure
        self._breaker = CircuitBreaker(limits.cooldown_s)
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=limits.max_connections,
            timeout=limits.timeout_s,
            socket_timeout=limits.timeout_s,
            socket_connect_timeout=limits.timeout_s,
            # Once at most: a pooled connection may have died with an earlier life of the server.
            retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
            protocol=2,
        )
        self._client = Redis.from_pool(pool)

    async def run(self, operation: str, commands: Sequence[Command]) -> list[Reply | None]:
        """Run a pipeline of idempotent commands.

        Args:
            operation: Name for metrics.
            commands: Each with one key; none that answers nil.

        Returns:
            A reply per command; None where the shard gave none. Every None has been reported to `on_failure`.
        """
        if not commands:
            return []
        if not self._breaker.allows(time.monotonic()):
            self._report(operation, "skipped", len(commands))
            return [None] * len(commands)
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                replies = await self._execute(commands)
        except (TimeoutError, RedisTimeoutError) as error:
            return self._lost(operation, "timeout", len(commands), error)
        except (RedisConnectionError, OSError) as error:
            return self._lost(operation, "connection", len(commands), error)
        if not self._breaker.is_closed:
            log.info("shard.returned shard=%s", self.name)
        self._breaker.succeeded()
        num_refused = sum(isinstance(reply, RedisError) for reply in replies)
        if num_refused:
            self._report(operation, "refused", num_refused)
        return [None if isinstance(reply, RedisError) else reply for reply in replies]

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def _execute(self, commands: Sequence[Command]) -> list[Reply]:
        replies = await self._pipeline(commands)
        if any(isinstance(reply, NoScriptError) for reply in replies):
            # A server that has restarted knows no scripts.
            await self._pipeline([("SCRIPT LOAD", script.text) for script in scripts.ALL])
            replies = await self._pipeline(commands)
        return replies

    async def _pipeline(self, commands: Sequence[Command]) -> list[Reply]:
        async with self._client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            return await pipeline.execute(raise_on_error=False)

    def _lost(self, operation: str, reason: str, num_commands: int, error: Exception) -> list[Reply | None]:
        if self._breaker.is_closed:
            log.warning("shard.lost shard=%s reason=%s error=%r", self.name, reason, error)
        self._breaker.failed(time.monotonic())
        self._report(operation, reason, num_commands)
        return [None] * num_commands

    def _report(self, operation: str, reason: str, num_commands: int) -> None:
        self._on_failure(ShardFailure(shard=self.name, operation=operation, reason=reason, num_commands=num_commands))
