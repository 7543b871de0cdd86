"""What every registry promises: who is alive, and who holds which leading blocks.

A registry is a hint. Loss, staleness or a dead shard may cost a recompute, never a wrong answer: the reader of a
block checks with its owner before it uses the bytes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Literal, Protocol, Self

from messages.errors import RegistryError
from messages.handoff import BlockKey

Tier = Literal["device", "host", "disk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """One life of one worker, as it describes itself to routers."""

    worker_id: str
    """Not empty; the same after a restart."""
    incarnation: str
    """Random, one per life."""
    address: str
    """host:port of the worker's internal gRPC server."""
    pool: str
    role: str
    model: str
    """Name that requests use."""
    fingerprint: str
    """Layout fingerprint; blocks move only between equal ones."""
    block_size: int
    """Tokens per block."""
    key_model: str
    """`model` of the extras that root this worker's block keys."""
    key_codec: str
    """`codec` of the extras that root this worker's block keys."""
    context_length: int
    """Most tokens of prompt and output together."""

    def to_json(self) -> str:
        """Return one line of JSON, the same for equal records."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what `to_json` wrote; fields of a newer version are skipped.

        Raises:
            RegistryError: Not a record, or a field is missing.
        """
        try:
            values = json.loads(text)
            return cls(**{name: values[name] for name in (f.name for f in fields(cls))})
        except (ValueError, KeyError, TypeError) as error:
            raise RegistryError("a worker record cannot be read", reason=repr(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHits:
    """How many leading blocks of a prompt each live worker holds."""

    by_worker: Mapping[str, int] = field(default_factory=dict)
    """Only workers that hold at least one block; a run may span blocks that are unknown but never ends on one."""
    unknown: bool = False
    """A shard did not answer, so some of the blocks asked for may be held or not."""


class Registry(Protocol):
    """The cluster's view of its workers and their cached blocks. An async context manager; leaving closes it."""

    async def register(self, record: WorkerRecord, *, lease_s: float) -> None:
        """Make the worker visible for `lease_s` from now; again to renew. A new incarnation replaces an older one.

        Raises:
            RegistryError: No shard took it, or another incarnation has replaced this one and is alive.
        """

    async def unregister(self, worker_id: str, incarnation: str) -> None:
        """Take this life of the worker away at once; any other life stays. Best effort: the lease ends it anyway."""

    async def workers(self) -> list[WorkerRecord]:
        """Return the workers whose lease runs, by id.

        Raises:
            RegistryError: No shard answers, so nothing is known.
        """

    async def publish(
        self, worker_id: str, incarnation: str, keys: Sequence[BlockKey], *, tier: Tier = "device"
    ) -> None:
        """Say that the worker holds these complete blocks. Never raises for a dead shard: its keys are dropped."""

    async def withdraw(self, worker_id: str, incarnation: str, keys: Sequence[BlockKey]) -> None:
        """Say that the worker holds these blocks no longer; absent ones are skipped. Never raises for a dead shard."""

    async def lookup(self, keys: Sequence[BlockKey]) -> PrefixHits:
        """Find who holds the longest prefix of `keys`. Never raises for a dead shard: its keys are unknown."""

    async def close(self) -> None:
        """Give connections back; the registry is not usable afterwards."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None: ...
