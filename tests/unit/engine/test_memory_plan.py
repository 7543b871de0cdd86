"""How many blocks a worker gets: from bytes, blocks or a share; by group; and what does not fit."""

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.main_memory import free_main_memory
from engine.memory_plan import (
    KvSize,
    MemoryPlan,
    Residence,
    Surroundings,
    blocks_at_peak,
    blocks_at_rest,
    free_bytes,
    longest_request,
    plan_memory,
    split_blocks,
    too_small_group,
)
from kv_store.layout import BlockLayout, KvGroup, arena_bytes
from messages.errors import ConfigError

MIB = 2**20
FULL = KvGroup(name="full", layers=(0, 1), num_kv_heads=2, k_dim=16, v_dim=16)
SLIDING = KvGroup(name="sliding", layers=(2, 3, 4, 5), num_kv_heads=2, k_dim=16, v_dim=16, window=128)
"""A block of 32 tokens has 16 KiB in the one and 32 KiB in the other."""
PLAIN = BlockLayout(groups=(FULL,), model_digest="d")
HYBRID = BlockLayout(groups=(FULL, SLIDING), model_digest="d")
LONG = Residence(context_length=32_000)


def plan(layout: BlockLayout, size: KvSize, residence: Residence = LONG, **where: Any) -> MemoryPlan:
    surroundings = Surroundings(**{"device": "cpu", "free_bytes": 512 * MIB, "weights_bytes": 100 * MIB, **where})
    return plan_memory(surroundings, layout, size, residence)


def test_blocks_go_before_bytes_and_bytes_before_a_share() -> None:
    assert plan(HYBRID, KvSize(num_blocks=7, num_bytes=MIB, share=0.5)).num_blocks == (7, 7)
    assert plan(PLAIN, KvSize(num_bytes=MIB, share=0.5)).num_blocks == (64,)


def test_a_share_is_of_what_the_weights_leave_to_each_worker() -> None:
    alone = plan(PLAIN, KvSize(share=0.5))
    with_another = plan(PLAIN, KvSize(share=0.5), num_workers=2)

    assert alone.kv_bytes == (512 - 100) // 2 * MIB
    assert with_another.kv_bytes == (256 - 100) // 2 * MIB


def test_two_workers_that_start_one_after_the_other_never_take_more_than_there_is() -> None:
    first = plan(PLAIN, KvSize(share=1.0), num_workers=2)
    taken = first.kv_bytes + first.surroundings.weights_bytes
    second = plan(PLAIN, KvSize(share=1.0), num_workers=2, free_bytes=512 * MIB - taken)

    assert taken + second.kv_bytes + second.surroundings.weights_bytes <= 512 * MIB


def test_what_does_not_fit_is_refused_with_the_numbers_and_the_remedy() -> None:
    with pytest.raises(
        ConfigError,
        match=r"on cpu: 100\.0 MiB of weights and 500\.0 MiB of KV do not fit into 512\.0 MiB; .*-memory\) to 412 MiB",
    ):
        plan(PLAIN, KvSize(num_bytes=500 * MIB))
    with pytest.raises(ConfigError, match="use dtype bfloat16 or a smaller model"):
        plan(PLAIN, KvSize(num_bytes=MIB), weights_bytes=600 * MIB)


def test_too_little_for_any_request_is_refused_with_the_least() -> None:
    with pytest.raises(ConfigError, match=r"kv_memory_bytes holds 0 tokens of KV; .* 1 B of KV memory, and 32\.0 KiB"):
        plan(PLAIN, KvSize(num_bytes=1))


def test_a_window_group_gets_what_a_long_prompt_needs_and_the_other_group_the_rest() -> None:
    blocks = split_blocks(HYBRID, 100 * MIB, LONG)

    assert blocks[1] == 1000
    assert blocks[0] == (100 * MIB - 1000 * 32 * 1024) // (16 * 1024)


def test_a_hybrid_model_holds_more_tokens_than_with_equal_groups() -> None:
    by_need = plan(HYBRID, KvSize(num_bytes=200 * MIB))
    equal = plan(HYBRID, KvSize(num_bytes=200 * MIB), Residence(context_length=32_000, keeps_prompts=True))

    assert equal.num_blocks[0] == pytest.approx(equal.num_blocks[1], abs=3)
    assert by_need.max_tokens > 2 * equal.max_tokens


def test_prompts_in_chunks_leave_window_groups_smaller_still() -> None:
    residence = Residence(context_length=32_000, chunk_tokens=256)

    blocks = split_blocks(HYBRID, 100 * MIB, residence)

    assert blocks[1] < 100
    assert longest_request(HYBRID, blocks, residence) == 32_000


def test_with_too_little_for_the_context_length_all_groups_are_equal_and_requests_shorter() -> None:
    made = plan(HYBRID, KvSize(num_bytes=9 * MIB))

    assert made.num_blocks == (192, 192)
    assert made.context_length == 192 * 32


def test_a_group_that_a_request_does_not_fit_into_is_named() -> None:
    chunked = Residence(context_length=32_000, chunk_tokens=64)

    assert too_small_group(HYBRID, (40, 10), 320, LONG) is None
    assert too_small_group(HYBRID, (40, 10), 321, LONG) == "sliding"
    assert too_small_group(HYBRID, (40, 10), 1280, chunked) is None
    assert too_small_group(HYBRID, (40, 10), 1281, chunked) == "full"


def test_blocks_that_a_request_needs_by_group() -> None:
    chunked = Residence(context_length=10_000, chunk_tokens=64)

    assert blocks_at_peak(FULL, 1000, 32, LONG) == blocks_at_peak(SLIDING, 1000, 32, LONG) == 32
    assert blocks_at_rest(FULL, 1000, 32, LONG) == 32
    assert blocks_at_rest(SLIDING, 1000, 32, LONG) == 5
    assert blocks_at_rest(SLIDING, 40, 32, LONG) == 2
    assert blocks_at_peak(SLIDING, 1000, 32, chunked) == 7
    assert blocks_at_rest(SLIDING, 1000, 32, Residence(context_length=1000, keeps_prompts=True)) == 32


@given(
    num_bytes=st.integers(0, 300 * MIB),
    context_length=st.integers(2, 20_000),
    window=st.integers(1, 5000),
    keeps_prompts=st.booleans(),
    chunk_tokens=st.none() | st.integers(1, 1000),
)
def test_a_split_fits_wastes_little_and_holds_the_longest_request(
    num_bytes: int, context_length: int, window: int, *, keeps_prompts: bool, chunk_tokens: int | None
) -> None:
    group = KvGroup(name="w", layers=(2, 3, 4, 5), num_kv_heads=2, k_dim=16, v_dim=16, window=window)
    layout = BlockLayout(groups=(FULL, group), model_digest="d")
    residence = Residence(context_length=context_length, keeps_prompts=keeps_prompts, chunk_tokens=chunk_tokens)

    blocks = split_blocks(layout, num_bytes, residence)

    used = arena_bytes(layout, blocks)
    peak = [blocks_at_peak(each, context_length, 32, residence) for each in layout.groups]
    assert used <= num_bytes
    assert num_bytes - used <= 2 * (16 + 32) * 1024 + max(peak) * 48
    if all(count >= most for count, most in zip(blocks, peak, strict=True)):
        assert longest_request(layout, blocks, residence) == context_length
    longest = longest_request(layout, blocks, residence)
    assert longest == 0 or too_small_group(layout, blocks, longest, residence) is None


def test_the_table_names_weights_groups_and_tokens() -> None:
    lines = plan(HYBRID, KvSize(num_bytes=100 * MIB), num_workers=2).table().splitlines()

    cells = {line.split("  ")[0].strip() or line.split("  ")[1]: " ".join(line.split()) for line in lines}
    assert cells["device"] == "device cpu"
    assert cells["weights"] == "weights 100.0 MiB"
    assert cells["KV"] == "KV 100.0 MiB"
    assert cells["sliding"] == "sliding 31.2 MiB 1,000 blocks of 32.0 KiB, 4 layers, window 128, raw-float32"
    assert cells["full"] == "full 68.8 MiB 4,400 blocks of 16.0 KiB, 2 layers, all tokens, raw-float32"
    assert cells["KV of a token"] == "KV of a token 1.5 KiB 32 tokens per block"
    assert cells["context length"] == "context length 32,000 tokens of prompt and output"
    assert cells["concurrent tokens"] == "concurrent tokens 140,800 in requests of 32,000"
    assert len({line.index("iB") for line in lines if line.startswith(("weights", "KV  "))}) == 1


def test_free_memory_is_that_of_the_machine_or_of_its_container(tmp_path: Path) -> None:
    available = psutil.virtual_memory().available
    assert free_main_memory(tmp_path) == pytest.approx(available, rel=0.2)

    (tmp_path / "memory.max").write_text(f"{64 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{50 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {6 * MIB}\n")
    assert free_main_memory(tmp_path) == 20 * MIB

    (tmp_path / "memory.max").write_text("max\n")
    assert free_main_memory(tmp_path) == pytest.approx(available, rel=0.2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="torch sees none"):
        free_bytes(torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_free_memory_of_a_gpu_shrinks_by_what_is_allocated() -> None:
    device = torch.device("cuda")
    before = free_bytes(device)

    held = torch.zeros(512 * MIB, dtype=torch.uint8, device=device)

    assert before - free_bytes(device) >= held.numel()
