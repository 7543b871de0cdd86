"""The lease under which a decode worker reads one request's blocks from a prefill worker."""

from dataclasses import dataclass
from typing import NewType

BlockId = NewType("BlockId", int)
"""Physical index of a block in one KV group of one worker's arena."""
BlockKey = NewType("BlockKey", bytes)
"""Content hash of a full block and everything before it, 32 bytes, the same on every worker."""
HandoffId = NewType("HandoffId", str)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRef:
    """A block as the owner offers it."""

    block_id: BlockId
    key: BlockKey | None
    """None for a block that is not full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """What a reader must know to open a hand-off; made by the owner, carried by the gateway."""

    handoff_id: HandoffId
    worker_id: str
    incarnation: str
    address: str
    """host:port of the owner's internal gRPC server."""
    fingerprint: str
    """Layout fingerprint; a reader with another one must not read."""
    num_tokens: int
    """Prompt tokens that the blocks will hold once the prefill is done."""
    groups: tuple[tuple[BlockRef | None, ...], ...]
    """Per KV group, per logical block; None is a hole that no later token needs."""
    lease_s: float
    """Duration from when the owner last heard of this hand-off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenReply:
    """The owner's answer to Open: the blocks are pinned under this generation."""

    generation: int
    agent_name: str
    agent_metadata: bytes
    group_offsets: tuple[int, ...]
    """Byte offset of each KV group's block 0 in the owner's registered arena."""
    lease_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseReply:
    """The owner's answer to Close."""

    is_valid: bool
    """Everything that was read under the generation is what the owner offered."""
    digests: tuple[int, ...] = ()
    """Of the blocks that were opened, group after group in order; empty when the owner computes none."""
