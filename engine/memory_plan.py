"""How many KV blocks a worker gets, decided before anything is loaded, and how many tokens they hold.

The rule for models with several KV groups, of which some have a window: a request whose prompt is computed keeps only
what lies inside the window, so a window group needs fewer blocks for the same requests. Every group gets as many blocks
as one request of the whole context length holds at its worst moment, which is while its prompt is computed; the memory
that is left is shared out in proportion to what such a request holds afterwards. So window groups stay small and the
others hold more tokens. Where a worker keeps whole prompts for a reader, both amounts are the same.
"""

from dataclasses import dataclass

import torch

from engine.main_memory import free_main_memory
from engine.memory_table import PlanTable, size_text
from kv_store.layout import BlockLayout, KvGroup, arena_bytes
from messages.errors import ConfigError

_LEAST_BLOCKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSize:
    """How large KV memory is to be; the first that is not None counts."""

    num_blocks: int | None = None
    """Blocks of every group."""
    num_bytes: int | None = None
    share: float | None = None
    """Of the worker's part of the memory that is free once the weights are there, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Where a worker runs and what is there."""

    device: str
    free_bytes: int
    """Before the weights are loaded."""
    weights_bytes: int
    num_workers: int = 1
    """Workers that divide the memory among them, this one included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residence:
    """How a request takes and gives back blocks, as the scheduler does it."""

    context_length: int
    """Most tokens of a request."""
    keeps_prompts: bool = False
    """Whether the blocks of a computed prompt stay until somebody has read them, windows or not."""
    chunk_tokens: int | None = None
    """Most tokens whose blocks a window group takes ahead of time; None: it takes those of the whole prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Memory of one worker, as it will be."""

    surroundings: Surroundings
    layout: BlockLayout
    residence: Residence
    num_blocks: tuple[int, ...]
    """Per group."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of the arena."""
        return arena_bytes(self.layout, self.num_blocks)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of KV that a token adds while all layers still see it."""
        groups = range(len(self.layout.groups))
        return sum(self.layout.block_bytes(group) for group in groups) / self.layout.block_size

    @property
    def context_length(self) -> int:
        """Most tokens of a request that this worker can serve."""
        return min(self.residence.context_length, longest_request(self.layout, self.num_blocks, self.residence))

    @property
    def max_tokens(self) -> int:
        """Tokens of KV at a time, over requests of `context_length` tokens whose prompts are computed."""
        shares = (
            count / blocks_at_rest(group, self.context_length, self.layout.block_size, self.residence)
            for group, count in zip(self.layout.groups, self.num_blocks, strict=True)
        )
        return int(min(shares) * self.context_length)

    def table(self) -> str:
        """Lay the plan out as a plain-text table of several lines."""
        where, layout = self.surroundings, self.layout
        table = PlanTable()
        table.add("device", where.device)
        table.add("free memory", size_text(where.free_bytes))
        if where.num_workers > 1:
            table.add("  workers that share it", f"{where.num_workers}")
        table.add("weights", size_text(where.weights_bytes))
        table.add("KV", size_text(self.kv_bytes))
        for number, group in enumerate(layout.groups):
            count, size = self.num_blocks[number], layout.block_bytes(number)
            kind = "all tokens" if group.window is None else f"window {group.window:,}"
            table.add(
                f"  {group.name}",
                size_text(count * size),
                f"{count:,} blocks of {size_text(size)}, {len(group.layers)} layers, {kind}, {group.codec}",
            )
        table.add("KV of a token", size_text(self.bytes_per_token), f"{layout.block_size} tokens per block")
        table.add("context length", f"{self.context_length:,}", "tokens of prompt and output")
        table.add("concurrent tokens", f"{self.max_tokens:,}", f"in requests of {self.context_length:,}")
        return table.text()


def plan_memory(where: Surroundings, layout: BlockLayout, size: KvSize, residence: Residence) -> MemoryPlan:
    """Decide a worker's blocks and make sure that they fit beside the weights.

    Raises:
        ConfigError: Weights and KV do not fit, or KV is too small for any request; the message has the numbers.
    """
    plan = MemoryPlan(
        surroundings=where,
        layout=layout,
        residence=residence,
        num_blocks=_num_blocks(where, layout, size, residence),
    )
    room = where.free_bytes - where.weights_bytes
    if plan.kv_bytes > room:
        raise ConfigError(
            f"too little memory on {where.device}: {size_text(where.weights_bytes)} of weights and "
            f"{size_text(plan.kv_bytes)} of KV do not fit into {size_text(where.free_bytes)}; "
            + (
                f"set models.0.kv_memory_bytes (--kv-memory) to {room // 2**20} MiB or less"
                if room > 0
                else "use dtype bfloat16 or a smaller model"
            )
        )
    return plan


def split_blocks(layout: BlockLayout, num_bytes: int, residence: Residence) -> tuple[int, ...]:
    """Give each group its part of `num_bytes` by the rule of this module.

    Returns:
        Blocks per group; the same number for all, 0 perhaps, when there is not room for one request of whole length.
    """
    size = layout.block_size
    sizes = [layout.block_bytes(group) for group in range(len(layout.groups))]
    least = [blocks_at_peak(group, residence.context_length, size, residence) for group in layout.groups]
    rest = [blocks_at_rest(group, residence.context_length, size, residence) for group in layout.groups]
    if arena_bytes(layout, least) > num_bytes:
        return (num_bytes // sum(sizes),) * len(sizes)

    def blocks(num_requests_1024: int) -> tuple[int, ...]:
        return tuple(max(low, num_requests_1024 * each // 1024) for low, each in zip(least, rest, strict=True))

    # The largest number of requests, in 1/1024, whose blocks fit.
    low, high = 0, 1024 * (num_bytes // max(1, min(sizes)) + 1)
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if arena_bytes(layout, blocks(middle)) <= num_bytes else (low, middle)
    return blocks(low)


def blocks_at_peak(group: KvGroup, num_tokens: int, block_size: int, residence: Residence) -> int:
    """Most blocks of a group that one request of `num_tokens` tokens holds at a time."""
    whole = -(-num_tokens // block_size)
    if group.window is None or residence.keeps_prompts or residence.chunk_tokens is None:
        return whole
    return min(whole, _spanning(group.window + residence.chunk_tokens, block_size))


def blocks_at_rest(group: KvGroup, num_tokens: int, block_size: int, residence: Residence) -> int:
    """Blocks of a group that one request of `num_tokens` tokens holds while it decodes, or waits to be read."""
    whole = -(-num_tokens // block_size)
    if group.window is None or residence.keeps_prompts:
        return whole
    return min(whole, _spanning(group.window + 1, block_size))


def too_small_group(
    layout: BlockLayout, num_blocks: tuple[int, ...], num_tokens: int, residence: Residence
) -> str | None:
    """Name a group in which a request of `num_tokens` tokens can never run; None when it can in all."""
    for group, count in zip(layout.groups, num_blocks, strict=True):
        if blocks_at_peak(group, num_tokens, layout.block_size, residence) > count:
            return group.name
    return None


def longest_request(layout: BlockLayout, num_blocks: tuple[int, ...], residence: Residence) -> int:
    """Most tokens of a request that can ever run; a longer one would wait for blocks for ever."""
    size = layout.block_size
    lengths = []
    for group, count in zip(layout.groups, num_blocks, strict=True):
        # A window group that holds the peak of the longest request holds any.
        is_enough = blocks_at_peak(group, residence.context_length, size, residence) <= count
        lengths.append(residence.context_length if is_enough else count * size)
    return min(lengths)


def free_bytes(device: torch.device) -> int:
    """Memory of a device that is free now: of the GPU, or of this machine or container.

    Raises:
        ConfigError: torch cannot use the device.
    """
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("a GPU is booked (num_gpus), but torch sees none; install its CUDA build or book none")
        return int(torch.cuda.mem_get_info(device)[0])
    return free_main_memory()


def _num_blocks(where: Surroundings, layout: BlockLayout, size: KvSize, residence: Residence) -> tuple[int, ...]:
    if size.num_blocks is not None:
        return (size.num_blocks,) * len(layout.groups)
    num_bytes = size.num_bytes
    if num_bytes is None:
        part = where.free_bytes // where.num_workers - where.weights_bytes
        num_bytes = max(0, int((size.share or 0.0) * part))
    found = split_blocks(layout, num_bytes, residence)
    if min(found) < _LEAST_BLOCKS:
        tokens = min(found) * layout.block_size
        raise ConfigError(
            f"models.0.kv_memory_bytes holds {tokens} tokens of KV; give it more: {size_text(num_bytes)} of KV memory, "
            f"and {size_text(arena_bytes(layout, [_LEAST_BLOCKS] * len(found)))} is the least"
        )
    return found


def _spanning(num_tokens: int, block_size: int) -> int:
    """Most blocks that `num_tokens` consecutive tokens touch."""
    return -(-(num_tokens - 1) // block_size) + 1
