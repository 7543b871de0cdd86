"""Every view is a window on exactly the right bytes of the one buffer."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_store.layout import ALIGNMENT, Arena, BlockLayout, KvGroup, arena_bytes
from kv_store.transfer.shared_memory import PeerMapping
from messages.errors import ConfigError
from messages.handoff import BlockId

ITEM_BYTES = {"raw-float32": 4, "raw-bfloat16": 2, "raw-float16": 2}


def group(**changes: Any) -> KvGroup:
    base = KvGroup(name="full", layers=(0, 1), num_kv_heads=2, k_dim=4, v_dim=4)
    return replace(base, **changes)


def layout(*groups: KvGroup, **changes: Any) -> BlockLayout:
    return replace(BlockLayout(groups=groups or (group(),), block_size=4, model_digest="m"), **changes)


@st.composite
def layouts(draw: st.DrawFn) -> BlockLayout:
    count = draw(st.integers(1, 3))
    layers = list(range(6))
    groups = []
    for number in range(count):
        mine = tuple(layers.pop() for _ in range(draw(st.integers(1, 2))))
        groups.append(
            KvGroup(
                name=f"g{number}",
                layers=mine,
                num_kv_heads=draw(st.integers(1, 4)),
                k_dim=draw(st.integers(1, 6)),
                v_dim=draw(st.integers(0, 6)),
                codec=draw(st.sampled_from(sorted(ITEM_BYTES))),
            )
        )
    return layout(*groups, block_size=draw(st.sampled_from([1, 3, 16])))


def byte_offset(arena: Arena, layer: int, kind: str, place: tuple[int, ...]) -> int:
    """The layout's definition, written out: [kv head][layer][k or v][token][dim]."""
    shape = arena.layout
    number = shape.group_of_layer(layer)
    mine = shape.groups[number]
    block, head, token, dim = place
    k_elements, v_elements = shape.block_size * mine.k_dim, shape.block_size * mine.v_dim
    elements = (head * len(mine.layers) + mine.layers.index(layer)) * (k_elements + v_elements)
    elements += token * mine.k_dim + dim if kind == "k" else k_elements + token * mine.v_dim + dim
    return arena.block_range(number, BlockId(block))[0] + elements * ITEM_BYTES[mine.codec]


@given(layouts(), st.data())
@settings(max_examples=60, deadline=None)
def test_writing_one_element_changes_exactly_its_bytes(shape: BlockLayout, data: st.DataObject) -> None:
    arena = Arena(shape, tuple(3 for _ in shape.groups))
    layer = data.draw(st.sampled_from([x for g in shape.groups for x in g.layers]))
    number = shape.group_of_layer(layer)
    kind = data.draw(st.sampled_from(["k", "v"] if shape.groups[number].v_dim else ["k"]))
    view = arena.layer_views(layer)["kv".index(kind)]
    place = tuple(data.draw(st.integers(0, size - 1)) for size in view.shape)

    view[place] = 1.5

    start = byte_offset(arena, layer, kind, place)
    item = ITEM_BYTES[shape.groups[number].codec]
    assert arena.buffer[start : start + item].view(view.dtype).item() == 1.5
    changed = arena.buffer.nonzero().flatten().tolist()
    assert all(start <= byte < start + item for byte in changed)
    offset, size = arena.block_range(number, BlockId(place[0]))
    assert offset <= start < offset + size


@given(layouts())
@settings(max_examples=30, deadline=None)
def test_the_views_of_a_block_cover_its_range_once_and_nothing_else(shape: BlockLayout) -> None:
    arena = Arena(shape, tuple(2 for _ in shape.groups))

    for number, mine in enumerate(shape.groups):
        for layer in mine.layers:
            for view in arena.layer_views(layer):
                view[1] = view[1] + 1

        offset, size = arena.block_range(number, BlockId(1))
        block = arena.buffer[offset : offset + size].view(arena.layer_views(mine.layers[0])[0].dtype)
        assert bool((block == 1).all())
        arena.buffer[offset : offset + size] = 0
    assert not arena.buffer.any()


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(8, 1), (8, 2), (8, 8)])
def test_heads_of_a_block_are_contiguous_for_mqa_gqa_and_mha(query_heads: int, kv_heads: int) -> None:
    arena = Arena(layout(group(num_kv_heads=kv_heads, k_dim=6, v_dim=3)), (5,))
    k, v = arena.layer_views(1)

    assert k.shape == (5, kv_heads, 4, 6)
    assert v.shape == (5, kv_heads, 4, 3)
    assert query_heads % k.shape[1] == 0
    head_bytes = arena.block_range(0, BlockId(0))[1] // kv_heads
    k[2, kv_heads - 1] = 1
    v[2, kv_heads - 1] = 1
    changed = arena.buffer.nonzero().flatten()
    offset, size = arena.block_range(0, BlockId(2))
    assert offset + size - head_bytes <= int(changed.min())
    assert int(changed.max()) < offset + size


def test_views_share_the_buffer_and_are_given_without_a_copy() -> None:
    arena = Arena(layout(), (2,))
    k, _ = arena.layer_views(0)

    assert k.untyped_storage().data_ptr() == arena.buffer.untyped_storage().data_ptr()
    assert arena.layer_views(0)[0] is k


def test_a_copied_range_is_the_same_block_in_another_arena() -> None:
    shape = layout(group(k_dim=5, v_dim=3))
    source, target = Arena(shape, (4,)), Arena(shape, (2,))
    for layer in (0, 1):
        for view in source.layer_views(layer):
            view.copy_(torch.randn(view.shape))

    (at, size), (to, _) = source.block_range(0, BlockId(3)), target.block_range(0, BlockId(1))
    target.buffer[to : to + size] = source.buffer[at : at + size]

    for layer in (0, 1):
        for theirs, ours in zip(source.layer_views(layer), target.layer_views(layer), strict=True):
            assert torch.equal(theirs[3], ours[1])
            assert not ours[0].any()


def test_the_arena_is_zero_and_aligned_and_as_large_as_promised() -> None:
    shape = layout(group(), group(name="window", layers=(2,), window=8, num_kv_heads=1))
    arena = Arena(shape, (3, 40))

    assert not arena.buffer.any()
    assert arena.buffer.data_ptr() % ALIGNMENT == 0
    assert arena.group_offset(0) == 0
    assert arena.group_offset(1) == ALIGNMENT
    assert arena.buffer.numel() == arena.bytes_total == arena_bytes(shape, (3, 40))
    assert arena.bytes_total >= sum(n * shape.block_bytes(g) for g, n in enumerate((3, 40)))


def test_block_bytes_count_heads_layers_tokens_and_both_rows() -> None:
    assert layout(group(num_kv_heads=3, k_dim=8, v_dim=2, codec="raw-bfloat16")).block_bytes(0) == 3 * 2 * 4 * 10 * 2


@pytest.mark.parametrize("block_id", [-1, 3])
def test_a_block_outside_the_group_has_no_range(block_id: int) -> None:
    with pytest.raises(IndexError):
        Arena(layout(), (3,)).block_range(0, BlockId(block_id))


def test_draft_layers_have_views_of_their_own() -> None:
    shape = layout(group(), group(name="draft", layers=(0,), owner="draft", k_dim=2, v_dim=2))
    arena = Arena(shape, (1, 1))

    assert shape.group_of_layer(0) == 0
    assert shape.group_of_layer(0, "draft") == 1
    assert arena.layer_views(0, "draft")[0].shape == (1, 2, 4, 2)
    with pytest.raises(KeyError):
        shape.group_of_layer(1, "draft")


OTHERS = {
    "block size": layout(block_size=8),
    "model": layout(model_digest="n"),
    "rope": layout(rope_digest="r"),
    "rank": layout(tp_rank=1, tp_size=2),
    "ranks": layout(tp_size=2),
    "layers": layout(group(layers=(1, 0))),
    "heads": layout(group(num_kv_heads=4)),
    "k and v swapped": layout(group(k_dim=2, v_dim=6)),
    "window": layout(group(window=8)),
    "codec": layout(group(codec="raw-float16")),
    "owner": layout(group(owner="draft")),
    "name": layout(group(name="other")),
    "group": layout(group(), group(name="second", layers=(2,))),
}


def test_every_field_changes_the_fingerprint() -> None:
    """Rule 13."""
    prints = {layout().fingerprint, *(other.fingerprint for other in OTHERS.values())}

    assert len(prints) == len(OTHERS) + 1
    assert all(len(text) == 32 and int(text, 16) >= 0 for text in prints)


def test_the_fingerprint_is_pinned() -> None:
    assert layout().fingerprint == "9adea05cb774d66c1140f8e8b5e7a800"


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": ()},
        {"layers": (1, 1)},
        {"num_kv_heads": 0},
        {"k_dim": 0},
        {"v_dim": -1},
        {"window": 0},
        {"window": -4},
        {"codec": "x"},
    ],
)
def test_a_group_with_impossible_sizes_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        group(**changes)


@pytest.mark.parametrize(
    "make",
    [
        lambda: layout(groups=()),
        lambda: layout(block_size=0),
        lambda: layout(tp_rank=1),
        lambda: layout(group(), group(layers=(2,))),
        lambda: layout(group(), group(name="b", layers=(1,))),
        lambda: Arena(layout(), (1, 1)),
        lambda: Arena(layout(), (0,)),
    ],
)
def test_an_impossible_layout_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()


def test_a_shared_arena_is_mapped_by_others_where_its_own_process_writes() -> None:
    arena = Arena(layout(), (2,), is_shared=True)
    assert arena.shared is not None
    mapping = PeerMapping.open(arena.shared.address)
    assert mapping is not None
    offset = arena.buffer.data_ptr() - arena.shared.tensor.data_ptr()

    start, size = arena.block_range(0, BlockId(1))
    arena.buffer[start : start + size] = 7

    assert arena.buffer.data_ptr() % ALIGNMENT == 0
    assert (mapping.bytes[offset + start : offset + start + size] == 7).all()
    assert not (mapping.bytes[offset : offset + start] == 7).any()
    mapping.close()


def test_an_arena_is_its_own_processs_unless_it_is_to_be_shared() -> None:
    assert Arena(layout(), (2,)).shared is None
