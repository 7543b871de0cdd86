"""One Redis of the registry: a pipeline goes in, a reply or None per command comes out, nothing is raised.

A shard that fails is left alone for a moment, so that a dead one does not slow every lookup down.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from hiredis import pack_command
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import AuthenticationError, NoScriptError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from kv_store.registry import scripts
from kv_store.registry.connection import ShardAddress, ShardLimits
from kv_store.registry.protocol import PrefixHits
from kv_store.registry.scripts import Command, Script

__all__ = ["CircuitBreaker", "RegistryShard", "Reply", "ShardFailure", "ShardHooks", "ShardLimits"]

log = logging.getLogger(__name__)

Reply = object
"""What a shard answered; None stands for no answer, so no command used here may answer nil."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFailure:
    """Commands that one shard did not carry out; their effect is lost or their answer unknown."""

    shard: str
    operation: str
    reason: str
    """timeout, connection, authentication, refused (the shard answered with an error), skipped (it failed a moment ago)
    or uncovered (no server of the cluster keeps the key)."""
    num_commands: int


def _ignore_failure(failure: ShardFailure) -> None:
    del failure


def _ignore_answer(shard: str, operation: str, seconds: float) -> None:
    del shard, operation, seconds


def _ignore_lookup(hits: PrefixHits) -> None:
    del hits


def _ignore_stale(by: str, num_claims: int) -> None:
    del by, num_claims


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHooks:
    """Who hears of what shards do and what came of it; must not block."""

    on_failure: Callable[[ShardFailure], None] = _ignore_failure
    on_answer: Callable[[str, str, float], None] = _ignore_answer
    """Called with shard, operation and seconds for every pipeline that was answered."""
    on_lookup: Callable[[PrefixHits], None] = _ignore_lookup
    """Called with what every lookup found."""
    on_stale: Callable[[str, int], None] = _ignore_stale
    """Called with "lookup" (ignored them) or "sweep" (removed them), and how many claims of ended lives it met."""


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

    def __init__(
        self,
        address: ShardAddress,
        limits: ShardLimits,
        hooks: ShardHooks,
        known_scripts: Sequence[Script] = scripts.ALL,
    ) -> None:
        """Connect lazily; `known_scripts` are those that commands may run."""
        self.name = address.name
        self.address = address
        self._limits = limits
        self._hooks = hooks
        self._scripts = known_scripts
        self._breaker = CircuitBreaker(limits.cooldown_s)
        self._idle: list[AbstractConnection] = []
        self._may_send = asyncio.Semaphore(limits.max_connections)

    @property
    def is_silent(self) -> bool:
        """Whether the last pipeline got no answer."""
        return not self._breaker.is_closed

    async def run(self, operation: str, commands: Sequence[Command]) -> list[Reply | None]:
        """Run a pipeline of idempotent commands.

        Args:
            operation: Name for metrics.
            commands: Each with one key; none that answers nil.

        Returns:
            A reply per command; None where the shard gave none. Every None has been reported.
        """
        replies = await self.ask(operation, commands)
        num_refused = sum(isinstance(reply, RedisError) for reply in replies)
        if num_refused:
            self.report(operation, "refused", num_refused)
        return [None if isinstance(reply, RedisError) else reply for reply in replies]

    async def ask(self, operation: str, commands: Sequence[Command]) -> list[Reply | None]:
        """Run a pipeline as `run` does, but leave errors that the shard answered (RedisError) among the replies."""
        if not commands:
            return []
        if not self._breaker.allows(time.monotonic()):
            self.report(operation, "skipped", len(commands))
            return [None] * len(commands)
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                replies = await self._execute(commands)
        except (TimeoutError, RedisTimeoutError) as error:
            return self._lost(operation, "timeout", len(commands), error)
        except AuthenticationError as error:
            return self._lost(operation, "authentication", len(commands), error)
        except (RedisError, OSError) as error:
            # Also what is no Redis at all, and what a server answers to the first words of a connection.
            return self._lost(operation, "connection", len(commands), error)
        if not self._breaker.is_closed:
            log.info("shard.returned shard=%s", self.name)
        self._breaker.succeeded()
        self._hooks.on_answer(self.name, operation, time.monotonic() - started_s)
        return replies

    def report(self, operation: str, reason: str, num_commands: int) -> None:
        """Tell of commands that were not carried out."""
        failure = ShardFailure(shard=self.name, operation=operation, reason=reason, num_commands=num_commands)
        self._hooks.on_failure(failure)

    async def close(self) -> None:
        """Close every connection."""
        while self._idle:
            await self._idle.pop().disconnect()

    async def _execute(self, commands: Sequence[Command]) -> list[Reply]:
        replies = await self._pipeline(commands)
        if any(isinstance(reply, NoScriptError) for reply in replies):
            # A server that has restarted knows no scripts.
            await self._pipeline([("SCRIPT", "LOAD", script.text) for script in self._scripts])
            replies = await self._pipeline(commands)
        return replies

    async def _pipeline(self, commands: Sequence[Command]) -> list[Reply]:
        """Send commands and read their replies, as the server words them, on a connection of our own.

        Source: redis-py's pipeline, whose bookkeeping per command costs more than the command.
        """
        words = b"".join([pack_command(cast("Any", command)) for command in commands])
        async with self._may_send:
            if self._idle:
                try:
                    return await self._exchange(self._idle.pop(), words, len(commands))
                except RedisConnectionError:
                    # It may have died with an earlier life of the server, and the others with it.
                    await self.close()
            return await self._exchange(self.address.make_connection(self._limits), words, len(commands))

    async def _exchange(self, connection: AbstractConnection, words: bytes, num_replies: int) -> list[Reply]:
        replies: list[Reply] = []
        try:
            await connection.send_packed_command(words, check_health=False)
            for _ in range(num_replies):
                try:
                    replies.append(await connection.read_response(disconnect_on_error=False))
                except ResponseError as error:
                    replies.append(error)
        except BaseException:
            # Replies that are still to come would be taken for those to later commands.
            await connection.disconnect(nowait=True)
            raise
        self._idle.append(connection)
        return replies

    def _lost(self, operation: str, reason: str, num_commands: int, error: Exception) -> list[Reply | None]:
        if self._breaker.is_closed:
            log.warning("shard.lost shard=%s reason=%s error=%r", self.name, reason, error)
        self._breaker.failed(time.monotonic())
        self.report(operation, reason, num_commands)
        return [None] * num_commands
