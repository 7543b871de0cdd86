"""A registry whose commands are slow, refused or unanswered, as a plan of faults says."""

from collections.abc import Callable
from typing import cast

from kv_store.registry.protocol import PrefixHits, Registry
from messages.errors import RegistryError
from messages.faults import Faults
from messages.faulty_calls import FaultyCalls

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


def with_faults(registry: Registry, faults: Faults) -> Registry:
    """Put the fault points around a registry; it comes back as it is when none is planned."""
    return cast("Registry", FaultyCalls(registry, faults, PREFIX, _unanswered)) if faults.has(PREFIX) else registry


def _unanswered(name: str) -> object:
    if name not in _UNANSWERED:
        raise RegistryError("a fault was asked for here", point=PREFIX + name)
    return _UNANSWERED[name]()
