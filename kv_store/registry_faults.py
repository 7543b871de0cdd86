"""A registry whose commands are slow, refused or unanswered, as a plan of faults says."""

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Self, cast

from kv_store.registry.protocol import PrefixHits, Registry
from messages.errors import RegistryError
from messages.faults import Faults

PREFIX = "registry."

_UNANSWERED: dict[str, Callable[[], object]] = {
    "lookup": lambda: PrefixHits(unknown=True),
    "spread": dict,
    "shards": tuple,
    "write": lambda: None,
    "unregister": lambda: None,
    "tend": lambda: None,
}
"""What the operations that never raise give when no shard answers; all others raise."""


class FaultyRegistry:
    """A Registry around another one: each command passes point `registry.<operation>`.

    error: nothing is done. drop: it is done, and the answer is lost. To the caller both are shards that do not answer.

    Args:
        inner: Does the work.
        faults: What is planned.
    """

    def __init__(self, inner: Registry, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if not inspect.iscoroutinefunction(attribute) or not self._faults.has(PREFIX + name):
            return attribute
        return functools.partial(self._pass, name, attribute)

    async def _pass(self, name: str, call: Callable[..., Awaitable[object]], *args: object, **named: object) -> object:
        try:
            fired = await self._faults.at(PREFIX + name, RegistryError)
        except RegistryError:
            return self._unanswered(name)
        answer = await call(*args, **named)
        return self._unanswered(name) if fired.is_dropped else answer

    @staticmethod
    def _unanswered(name: str) -> object:
        if name not in _UNANSWERED:
            raise RegistryError("a fault was asked for here", point=PREFIX + name)
        return _UNANSWERED[name]()

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._inner.__aexit__(*exc_info)


def with_faults(registry: Registry, faults: Faults) -> Registry:
    """Put the fault points around a registry; it comes back as it is when none is planned."""
    return cast("Registry", FaultyRegistry(registry, faults)) if faults.has(PREFIX) else registry
