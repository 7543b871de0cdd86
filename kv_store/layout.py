"""Where every byte of KV lies: groups of layers, blocks, and the one arena that holds them.

    arena   [group 0: block 0 | block 1 | ...] pad to 4096 [group 1: block 0 | ...] pad
    block   [kv head][layer of the group][k, then v][token][dim]

One block is one contiguous range, so it moves as one message; a head's bytes are contiguous in it.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate

import torch

from kv_store.codec import Codec, codec_named
from kv_store.huge_pages import advise_huge_pages
from kv_store.transfer.shared_memory import SharedBuffer
from messages.errors import ConfigError
from messages.handoff import BlockId

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
"""Raised when the byte order inside a block changes."""
ALIGNMENT = 4096
"""Bytes; the arena and every group region start at a multiple of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGroup:
    """Layers of one attention kind; they share one block table.

    Raises:
        ConfigError: A size is not positive, a layer is listed twice, or the codec is unknown.
    """

    name: str
    layers: tuple[int, ...]
    num_kv_heads: int
    """KV heads on this rank."""
    k_dim: int
    v_dim: int
    """0 where values are part of the key rows."""
    window: int | None = None
    """Tokens that a query sees at most, itself included; None sees all."""
    codec: str = "raw-float32"
    owner: str = "target"
    """Which model's layers these are: target or draft."""

    def __post_init__(self) -> None:
        sizes = (len(self.layers), self.num_kv_heads, self.k_dim, self.v_dim + 1, self.window or 1)
        if min(sizes) < 1 or self.window == 0:
            raise ConfigError("a KV group needs layers, heads, dims and a window that are positive", group=self.name)
        if len(set(self.layers)) != len(self.layers):
            raise ConfigError("a KV group lists a layer twice", group=self.name)
        codec_named(self.codec)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """How one worker lays out its KV; two workers may exchange blocks only if their fingerprints are equal.

    Raises:
        ConfigError: No groups, a name or a layer in two groups, or a block size below 1.
    """

    groups: tuple[KvGroup, ...]
    block_size: int = 32
    """Tokens per block."""
    model_digest: str
    rope_digest: str = ""
    """What the rotary embedding depends on beyond the weights."""
    tp_rank: int = 0
    tp_size: int = 1

    def __post_init__(self) -> None:
        names = [group.name for group in self.groups]
        layers = [(group.owner, layer) for group in self.groups for layer in group.layers]
        if not names or self.block_size < 1:
            raise ConfigError("a block layout needs a group and a positive block size", block_size=self.block_size)
        if len(set(names)) != len(names) or len(set(layers)) != len(layers):
            raise ConfigError("a group name or a layer is used twice", groups=names)
        if not 0 <= self.tp_rank < self.tp_size:
            raise ConfigError("tensor-parallel rank out of range", tp_rank=self.tp_rank, tp_size=self.tp_size)

    def block_bytes(self, group: int) -> int:
        """Size of one block of group number `group`."""
        shape = self.groups[group]
        codec = codec_named(shape.codec)
        row_bytes = codec.row_bytes(shape.k_dim) + codec.row_bytes(shape.v_dim)
        return shape.num_kv_heads * len(shape.layers) * self.block_size * row_bytes

    def group_of_layer(self, layer: int, owner: str = "target") -> int:
        """Number of the group that holds a layer.

        Raises:
            KeyError: No group holds it.
        """
        for number, group in enumerate(self.groups):
            if group.owner == owner and layer in group.layers:
                return number
        raise KeyError((owner, layer))

    @property
    def fingerprint(self) -> str:
        """32 hex digits over the schema version and every field, the same in every process."""
        described = json.dumps({"schema": SCHEMA_VERSION, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(described.encode()).hexdigest()[:32]


def arena_bytes(layout: BlockLayout, num_blocks: Sequence[int]) -> int:
    """Bytes that an arena takes with `num_blocks[g]` blocks in group g."""
    return _region_offsets(layout, num_blocks)[-1]


class Arena:
    """One worker's KV memory: one byte buffer, read and written through strided views of it.

    Args:
        layout: What lies where.
        num_blocks: Of each group.
        device: Where.
        is_shared: Whether other processes of this machine may map it; only of host memory.

    Raises:
        ConfigError: `num_blocks` does not give a positive count for each group.
    """

    def __init__(
        self,
        layout: BlockLayout,
        num_blocks: tuple[int, ...],
        device: torch.device | str = "cpu",
        *,
        is_shared: bool = False,
    ) -> None:
        if len(num_blocks) != len(layout.groups) or min(num_blocks) < 1:
            raise ConfigError("every KV group needs at least one block", num_blocks=num_blocks)
        self.layout = layout
        self.num_blocks = num_blocks
        *self._offsets, self.bytes_total = _region_offsets(layout, num_blocks)
        self._block_bytes = [layout.block_bytes(group) for group in range(len(num_blocks))]
        self.shared = _make_shared(self.bytes_total + ALIGNMENT, device) if is_shared else None
        """What `buffer` is a part of, for peers on the same machine to map; None: it is this process's own."""
        self.buffer = _aligned_zeros(self.bytes_total, device, self.shared)
        self._views = {
            (group.owner, layer): self._make_views(number, index)
            for number, group in enumerate(layout.groups)
            for index, layer in enumerate(group.layers)
        }

    def group_offset(self, group: int) -> int:
        """Byte offset of the group's block 0 in `buffer`."""
        return self._offsets[group]

    def block_range(self, group: int, block_id: BlockId) -> tuple[int, int]:
        """Give a block's (offset, size) in `buffer`, bytes.

        Raises:
            IndexError: The group has no such block.
        """
        if not 0 <= block_id < self.num_blocks[group]:
            raise IndexError(block_id)
        size = self._block_bytes[group]
        return self._offsets[group] + block_id * size, size

    def layer_views(self, layer: int, owner: str = "target") -> tuple[torch.Tensor, torch.Tensor]:
        """Give a layer's keys and values in all blocks, without a copy.

        Returns:
            k (N, H, S, k_dim) and v (N, H, S, v_dim) in the codec's dtype; N blocks, S tokens per block.
        """
        return self._views[owner, layer]

    def _make_views(self, number: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        group = self.layout.groups[number]
        codec = codec_named(group.codec)
        k_bytes, v_bytes = (self.layout.block_size * codec.row_bytes(dim) for dim in (group.k_dim, group.v_dim))
        first = index * (k_bytes + v_bytes)
        keys = self._strided(number, codec, group.k_dim, first)
        return keys, self._strided(number, codec, group.v_dim, first + k_bytes)

    def _strided(self, number: int, codec: Codec, dim: int, first_byte: int) -> torch.Tensor:
        group, num_blocks, size = self.layout.groups[number], self.num_blocks[number], self._block_bytes[number]
        start = self._offsets[number]
        region = self.buffer[start : start + num_blocks * size].view(codec.dtype)
        byte_strides = (size, size // group.num_kv_heads, codec.row_bytes(dim), codec.dtype.itemsize)
        return region.as_strided(
            (num_blocks, group.num_kv_heads, self.layout.block_size, dim),
            [stride // codec.dtype.itemsize for stride in byte_strides],
            region.storage_offset() + first_byte // codec.dtype.itemsize,
        )


def _region_offsets(layout: BlockLayout, num_blocks: Sequence[int]) -> list[int]:
    sizes = (layout.block_bytes(group) * count for group, count in enumerate(num_blocks))
    return list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))


def _make_shared(num_bytes: int, device: torch.device | str) -> SharedBuffer | None:
    if torch.device(device).type != "cpu":
        return None
    try:
        return SharedBuffer(num_bytes)
    except (OSError, AttributeError) as error:
        # Peers then read through the network library.
        log.warning("arena.not_shared error=%s", error)
        return None


def _aligned_zeros(num_bytes: int, device: torch.device | str, shared: SharedBuffer | None) -> torch.Tensor:
    raw = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8, device=device) if shared is None else shared.tensor
    # Before the first write, which is when pages come to be.
    if raw.device.type == "cpu":
        advise_huge_pages(raw.data_ptr(), raw.numel())
    raw.zero_()
    skip = -raw.data_ptr() % ALIGNMENT
    return raw[skip : skip + num_bytes]
