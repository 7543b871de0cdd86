"""The arena's attention against a plain one over whole sequences."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.dense import FUSED_TILE
from engine.attention.function import Score, arena_attention
from engine.attention.plan import RowGeometry
from engine.attention.torch_backend import ArenaAttention, CausalMasks
from engine.batch import Batch, Row
from kv_store.layout import Arena, BlockLayout, KvGroup
from messages.errors import ModelRefused
from messages.handoff import BlockId
from messages.requests import RequestId

HEADS, KV_HEADS, BLOCK = 6, 2, 4


def make_arena(k_dim: int = 8, v_dim: int = 8, window: int | None = None, num_blocks: int = 200) -> Arena:
    group = KvGroup(name="g", layers=(0, 1), num_kv_heads=KV_HEADS, k_dim=k_dim, v_dim=v_dim, window=window)
    return Arena(BlockLayout(groups=(group,), block_size=BLOCK, model_digest="m"), (num_blocks,))


def plain(sequence: tuple[torch.Tensor, ...], window: int | None, softcap: float | None) -> torch.Tensor:
    """Attention of one whole sequence in the simplest words: q (H, T, D), k and v to (T, H, D_v)."""
    q, k, v = (part.repeat_interleave(HEADS // part.shape[0], 0) for part in sequence)
    length = q.shape[1]
    scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    seen = (distance >= 0) & (distance < (window or length))
    return torch.matmul(scores.masked_fill(~seen, float("-inf")).softmax(-1), v).transpose(0, 1)


def run_steps(
    arena: Arena, tensors: list[tuple[torch.Tensor, ...]], cuts: list[list[int]], score: Score
) -> list[torch.Tensor]:
    """Feed sequence i in chunks that end at cuts[i], all sequences together; return their outputs."""
    attention = ArenaAttention(arena, torch.float32)
    outputs: list[list[torch.Tensor]] = [[] for _ in tensors]
    for step in range(max(len(ends) for ends in cuts)):
        members = [(i, ([0, *ends])[step], ends[step]) for i, ends in enumerate(cuts) if step < len(ends)]
        rows = tuple(
            Row(
                request_id=RequestId(str(i)),
                token_ids=(0,) * (end - start),
                start=start,
                block_ids=(tuple(BlockId(i + len(tensors) * b) for b in range(-(-end // BLOCK))),),
                sampling=None,
            )
            for i, start, end in members
        )
        q, k, v = (torch.cat([tensors[i][part][:, start:end] for i, start, end in members], dim=1) for part in range(3))
        out = attention.begin(Batch(rows=rows)).attend(1, q, k, v, score)
        first = 0
        for i, start, end in members:
            outputs[i].append(out[first : first + end - start])
            first += end - start
    return [torch.cat(pieces) for pieces in outputs]


def make_sequence(length: int, k_dim: int, v_dim: int) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(HEADS, length, k_dim),
        torch.randn(KV_HEADS, length, k_dim),
        torch.randn(KV_HEADS, length, v_dim),
    )


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    dims=st.sampled_from([(8, 8), (12, 8), (8, 20)]),
    window=st.sampled_from([None, 1, 3, 7, 64]),
    softcap=st.sampled_from([None, 2.0]),
)
def test_any_chunking_and_packing_equals_attention_over_the_whole(
    data: Any, lengths: list[int], dims: tuple[int, int], window: int | None, softcap: float | None
) -> None:
    torch.manual_seed(1)
    sequences = [make_sequence(length, *dims) for length in lengths]
    cuts = [
        sorted({*data.draw(st.lists(st.integers(1, length), max_size=5), label="cuts"), length}) for length in lengths
    ]

    outputs = run_steps(make_arena(*dims, window), sequences, cuts, Score(None, softcap, window))

    for output, sequence in zip(outputs, sequences, strict=True):
        torch.testing.assert_close(output, plain(sequence, window, softcap), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 50])
def test_a_chunk_longer_than_a_tile_attends_exactly(window: int | None) -> None:
    torch.manual_seed(1)
    length = 2 * FUSED_TILE + 9
    sequence = make_sequence(length, 8, 8)

    (output,) = run_steps(make_arena(window=window), [sequence], [[5, length]], Score(None, None, window))

    torch.testing.assert_close(output, plain(sequence, window, None), rtol=1e-4, atol=1e-5)


def test_blocks_of_other_requests_are_neither_read_nor_written() -> None:
    arena = make_arena()
    keys, values = arena.layer_views(1)
    keys.fill_(float("nan"))
    values.fill_(float("nan"))
    sequence = make_sequence(2 * BLOCK, 8, 8)
    ends = [BLOCK, *range(BLOCK + 1, 2 * BLOCK + 1)]
    # The unwritten tail of a request's own block is masked, but masked or not a NaN there would spread.
    keys[:2], values[:2] = 0.0, 0.0

    (output,) = run_steps(arena, [sequence], [ends], Score(None, None, None))

    assert output.isfinite().all()
    assert keys[2:].isnan().all()
    assert not arena.layer_views(0)[0].any()


@pytest.mark.parametrize(("k_dim", "v_dim"), [(8, 8), (12, 8), (8, 20), (7, 3)])
def test_row_geometry_gathers_what_the_view_shows(k_dim: int, v_dim: int) -> None:
    arena = make_arena(k_dim, v_dim, num_blocks=9)
    blocks = torch.tensor([[4, 0, 8], [2, 2, 1]])
    for view in arena.layer_views(1):
        view.copy_(torch.randn(view.shape))
        geometry = RowGeometry.of(view)

        gathered = geometry.rows(view).index_select(0, geometry.index(blocks))

        expected = view[blocks].permute(0, 2, 1, 3, 4).reshape(2, KV_HEADS, -1, view.shape[3])
        assert torch.equal(gathered.view(2, KV_HEADS, -1, view.shape[3]), expected)


def test_masks_do_not_change_when_they_grow() -> None:
    masks = CausalMasks(6, torch.float32, torch.device("cpu"))
    small = masks.corner(3, 9).clone()

    masks.corner(FUSED_TILE, 5 * FUSED_TILE)

    assert torch.equal(masks.corner(3, 9), small)
    assert (small == 0).sum(1).tolist() == [6, 6, 6]


def test_another_window_or_shape_than_the_layout_has_is_refused() -> None:
    arena = make_arena(window=8)
    q, k, v = make_sequence(1, 8, 8)
    row = Row(request_id=RequestId("r"), token_ids=(0,), start=0, block_ids=((BlockId(0),),), sampling=None)
    step = ArenaAttention(arena, torch.float32).begin(Batch(rows=(row,)))

    with pytest.raises(ModelRefused, match="window of 9"):
        step.attend(0, q, k, v, Score(None, None, 9))
    with pytest.raises(ModelRefused, match="another shape"):
        step.attend(0, q, k[:1], v[:1], Score(None, None, 8))
    with pytest.raises(ModelRefused, match="layer 2"):
        step.attend(2, q, k, v, Score(None, None, 8))


@pytest.mark.parametrize(
    ("mask", "options", "reason"),
    [
        (None, {}, "keyword arguments"),
        (torch.zeros(1, 1, 1, 1), {"kv_step": object()}, "mask"),
        (None, {"kv_step": object(), "s_aux": torch.zeros(2)}, "sinks"),
        (None, {"kv_step": object(), "dropout": 0.1}, "inference"),
    ],
)
def test_calls_that_would_give_wrong_results_are_refused(mask: Any, options: dict[str, Any], reason: str) -> None:
    q, k, v = (part[None] for part in make_sequence(1, 8, 8))

    with pytest.raises(ModelRefused, match=reason):
        arena_attention(None, q, k, v, mask, **options)
