"""Where the tokens of one step lie in one KV group: index tensors, made once and used by every layer of the group."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
import torch

from engine.batch import Batch, Row
from messages.handoff import BlockId


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGeometry:
    """One layer's K or V seen as a matrix of equally long rows, so that a gather copies whole runs of bytes.

    A run is what one head has in one block; it is `run_rows` rows of `unit` elements, in order.
    """

    unit: int
    """Elements of a row."""
    run_rows: int
    block_rows: int
    """Rows from a block to the next."""
    head_rows: int
    """Rows from a head to the next."""
    num_heads: int

    @classmethod
    def of(cls, view: torch.Tensor) -> "RowGeometry":
        """Describe a view (N, H, S, D) whose last two dims are contiguous."""
        run = view.shape[2] * view.shape[3]
        unit = gcd(run, view.stride(0), view.stride(1))
        return cls(
            unit=unit,
            run_rows=run // unit,
            block_rows=view.stride(0) // unit,
            head_rows=view.stride(1) // unit,
            num_heads=view.shape[1],
        )

    def rows(self, view: torch.Tensor) -> torch.Tensor:
        """Show a view of this geometry as its matrix, without a copy; row 0 is its first row."""
        num_rows = (view.shape[0] - 1) * self.block_rows + (self.num_heads - 1) * self.head_rows + self.run_rows
        return view.as_strided((num_rows, self.unit), (self.unit, 1), view.storage_offset())

    def index(self, blocks: torch.Tensor) -> torch.Tensor:
        """List the rows that hold blocks (B, M), ordered [sequence][head][block]; 1-D int64."""
        heads = torch.arange(self.num_heads, device=blocks.device)[None, :, None, None]
        runs = torch.arange(self.run_rows, device=blocks.device)
        return (blocks[:, None, :, None] * self.block_rows + heads * self.head_rows + runs).flatten()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """The blocks of some sequences, padded to one length of M blocks."""

    num_sequences: int
    key_index: torch.Tensor
    value_index: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """Sequences with one new token each that attend together."""

    tokens: torch.Tensor
    """(B,) places of the tokens in the packed step, int64."""
    gather: Gather
    mask: torch.Tensor
    """(B, 1, 1, M * block size), added to scores: 0 where the token may look, -inf elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """One sequence with several new tokens."""

    first_token: int
    """Place of the first new token in the packed step."""
    start: int
    """Its position in the sequence."""
    end: int
    """Context length after the step."""
    first_key: int
    """Position of the first gathered key."""
    gather: Gather


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """All index tensors of one KV group for one step."""

    blocks: torch.Tensor
    """(T,) block that takes each new token."""
    offsets: torch.Tensor
    """(T,) place of each new token inside its block."""
    decodes: tuple[DecodePlan, ...]
    prefills: tuple[PrefillPlan, ...]

    @property
    def is_one_decode(self) -> bool:
        """Whether all tokens of the step, in their order, are those of a single `DecodePlan`."""
        return len(self.decodes) == 1 and not self.prefills


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """What a plan must know of a group and its arena."""

    number: int
    window: int | None
    block_size: int
    keys: RowGeometry
    values: RowGeometry
    dtype: torch.dtype
    """Of scores, and so of masks."""
    device: torch.device


def plan_group(batch: Batch, shape: GroupShape) -> GroupPlan:
    """Work out where a step reads and writes in one group."""
    positions = np.concatenate([np.arange(row.start, row.end) for row in batch.rows])
    tables = [_block_array(row, shape, row.start // shape.block_size) for row in batch.rows]
    new_blocks = [
        table[np.arange(row.start, row.end) // shape.block_size - row.start // shape.block_size]
        for row, table in zip(batch.rows, tables, strict=True)
    ]
    firsts = np.cumsum([0, *(len(row.token_ids) for row in batch.rows)])
    decodes = [(int(first), row) for first, row in zip(firsts, batch.rows, strict=False) if len(row.token_ids) == 1]
    prefills = [(int(first), row) for first, row in zip(firsts, batch.rows, strict=False) if len(row.token_ids) > 1]
    return GroupPlan(
        blocks=torch.from_numpy(np.concatenate(new_blocks)).to(shape.device),
        offsets=torch.from_numpy(positions % shape.block_size).to(shape.device),
        decodes=tuple(_plan_decodes(bucket, shape) for bucket in _buckets(decodes, shape)),
        prefills=tuple(_plan_prefill(first, row, shape) for first, row in prefills),
    )


def _first_block(row: Row, shape: GroupShape) -> int:
    """Number of the first logical block that any new token of the row can see."""
    if shape.window is None:
        return 0
    return max(0, row.start - shape.window + 1) // shape.block_size


def _block_array(row: Row, shape: GroupShape, first: int) -> np.ndarray:
    wanted: Sequence[BlockId | None] = row.block_ids[shape.number][first : -(-row.end // shape.block_size)]
    return np.array(wanted, dtype=np.int64)


def _buckets(rows: list[tuple[int, Row]], shape: GroupShape) -> list[list[tuple[int, Row]]]:
    """Split by powers of two of blocks, so that a long context at most doubles what a short one costs."""
    buckets: dict[int, list[tuple[int, Row]]] = {}
    for first, row in rows:
        num_blocks = -(-row.end // shape.block_size) - _first_block(row, shape)
        buckets.setdefault(num_blocks.bit_length(), []).append((first, row))
    return list(buckets.values())


def _plan_decodes(bucket: list[tuple[int, Row]], shape: GroupShape) -> DecodePlan:
    firsts = [_first_block(row, shape) for _, row in bucket]
    tables = [_block_array(row, shape, first) for (_, row), first in zip(bucket, firsts, strict=True)]
    width = max(len(table) for table in tables)
    # Padding repeats the row's own last block: what lies in other requests' blocks is never touched, masked or not.
    blocks = np.stack([np.pad(table, (0, width - len(table)), mode="edge") for table in tables])
    ends = np.array([row.end for _, row in bucket])[:, None]
    positions = np.array(firsts)[:, None] * shape.block_size + np.arange(width * shape.block_size)
    seen = positions < ends
    if shape.window is not None:
        seen &= positions >= ends - shape.window
    mask = torch.zeros(seen.shape, dtype=shape.dtype)
    mask.masked_fill_(torch.from_numpy(~seen), float("-inf"))
    return DecodePlan(
        tokens=torch.tensor([token for token, _ in bucket], device=shape.device),
        gather=_gather(blocks, shape),
        mask=mask[:, None, None, :].to(shape.device),
    )


def _plan_prefill(first_token: int, row: Row, shape: GroupShape) -> PrefillPlan:
    first = _first_block(row, shape)
    return PrefillPlan(
        first_token=first_token,
        start=row.start,
        end=row.end,
        first_key=first * shape.block_size,
        gather=_gather(_block_array(row, shape, first)[None], shape),
    )


def _gather(blocks: np.ndarray, shape: GroupShape) -> Gather:
    ids = torch.from_numpy(blocks).to(shape.device)
    key_index = shape.keys.index(ids)
    same = shape.keys == shape.values
    return Gather(
        num_sequences=len(blocks), key_index=key_index, value_index=key_index if same else shape.values.index(ids)
    )
