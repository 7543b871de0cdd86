"""What every registry promises: who is alive, and who holds which leading blocks.

A registry is a hint. Loss, staleness or a dead shard may cost a recompute, never a wrong answer: the reader of a
block checks with its owner before it uses the bytes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
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
    generation: int = 0
    """Only what the worker claimed under its present generation counts; a higher one takes older claims away."""

    def to_json(self) -> str:
        """Return one line of JSON, the same for equal records."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what `to_json` wrote; fields of a newer version are skipped, those of an older one have their default.

        Raises:
            RegistryError: Not a record, or a field is missing.
        """
        try:
            values = json.loads(text)
            known = {f.name: values[f.name] for f in fields(cls) if f.default is MISSING or f.name in values}
            return cls(**known)
        except (ValueError, KeyError, TypeError) as error:
            raise RegistryError("a worker record cannot be read", reason=repr(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHits:
    """How many leading blocks of a prompt each live worker holds."""

    by_worker: Mapping[str, int] = field(default_factory=dict)
    """Only workers that hold at least one block; a run may span blocks that are unknown but never ends on one."""
    unknown: bool = False
    """A shard did not answer, so some of the blocks asked for may be held or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimant:
    """In whose name blocks are claimed."""

    worker_id: str
    incarnation: str
    generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMemory:
    """What a shard remembered of one life of a worker when that life spoke to it."""

    epoch: str
    """Random id that lives and is lost with the shard's data."""
    sequence: int
    """Number of the last batch that it took from this life before; 0 for none."""
    is_new: bool = False
    """Said of a registration: the shard did not list this life, or its lease had run out."""


class Registry(Protocol):
    """The cluster's view of its workers and their cached blocks. An async context manager; leaving closes it.

    Blocks are spread over shards. An owner writes with `spread` and `write`, numbers its batches per shard, and finds
    in every answer whether the shard lost something; `publish` and `withdraw` write without a number.
    """

    @property
    def num_silent(self) -> int:
        """Shards that did not answer when they were last asked."""
        ...

    async def register(self, record: WorkerRecord, *, lease_s: float) -> Mapping[str, ShardMemory]:
        """Make the worker visible for `lease_s` from now; again to renew. A new incarnation replaces an older one.

        A record that comes late, of a lower generation than this life has, only renews.

        Returns:
            What each shard that answered remembers, by shard.

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

    async def shards(self) -> tuple[str, ...]:
        """Return the present shards by name; none while they are not known."""
        ...

    async def spread(self, keys: Sequence[BlockKey]) -> dict[str, list[BlockKey]]:
        """Return, per shard, which of `keys` it keeps, in order; keys that nobody keeps now are left out."""
        ...

    async def write(
        self, shard: str, claimant: Claimant, changes: Mapping[BlockKey, Tier | None], sequence: int
    ) -> ShardMemory | None:
        """Say what became of blocks that `shard` keeps: held in a tier, or (None) held no longer.

        Args:
            shard: From `shards`.
            claimant: Who writes.
            changes: At most 512.
            sequence: Number of this batch, >= 1.

        Returns:
            What the shard remembered before; None when it did not answer to the whole batch, of which all or a part may
            have arrived. A claim that a full shard refuses is dropped.
        """
        ...

    async def publish(
        self,
        worker_id: str,
        incarnation: str,
        keys: Sequence[BlockKey],
        *,
        tier: Tier = "device",
        generation: int = 0,
    ) -> None:
        """Say that the worker holds these complete blocks. Never raises for a dead shard: its keys are dropped."""

    async def withdraw(self, worker_id: str, incarnation: str, keys: Sequence[BlockKey]) -> None:
        """Say that the worker holds these blocks no longer; absent ones are skipped. Never raises for a dead shard."""

    async def lookup(self, keys: Sequence[BlockKey]) -> PrefixHits:
        """Find who holds the longest prefix of `keys`. Never raises for a dead shard: its keys are unknown."""

    async def tend(self) -> None:
        """Do a bounded part of the cleaning up: claims of lives that have ended go. Call it again and again.

        Of all that call it, one cleans a shard at a time. Never raises for a dead shard.
        """

    async def close(self) -> None:
        """Give connections back; the registry is not usable afterwards."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None: ...
