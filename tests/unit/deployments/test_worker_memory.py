"""What a worker plans and then has: blocks by group, context length, memory shared with its neighbours."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from deployments.cli import commands
from deployments.config import AppConfig, load_config
from deployments.worker.memory import plan_worker
from deployments.worker.model_host import load_host
from engine.packed_linear import PackedLinear, can_pack
from messages.errors import ConfigError, ModelRefused
from tests.unit.engine.tiny_checkpoints import save_checkpoint, save_gguf
from tests.unit.engine.tiny_models import make_config

UNIFIED = {"name": "all", "role": "unified"}


def config_with(pools: list[dict[str, Any]] | None = None, **model: Any) -> AppConfig:
    overrides = {f"models.0.{name}": value for name, value in {"dtype": "float32", **model}.items()}
    return load_config(None, overrides | {"pools": pools or [UNIFIED]})


def test_a_loaded_worker_has_what_was_planned(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "gemma3")
    config = config_with(kv_memory_bytes=2**20, block_size=16, context_length=300)

    planned = plan_worker(config, config.pools[0], folder)
    host = load_host(config, config.pools[0], folder)

    sliding, full = host.num_blocks
    assert host.num_blocks == planned.num_blocks == host.arena.num_blocks
    assert host.arena.bytes_total <= 2**20
    assert sliding * 16 >= 300
    assert full > 2 * sliding
    assert (host.context_length, host.limits.context_length, host.loaded.context_length) == (300, 300, 300)


def test_a_prefill_worker_keeps_whole_prompts_and_has_equal_groups(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "gemma3")
    config = config_with([{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}], kv_memory_bytes=2**21)

    prefill, decode = (plan_worker(config, pool, folder).num_blocks for pool in config.pools)

    assert prefill[0] == pytest.approx(prefill[1], abs=2)
    assert decode[1] > 2 * decode[0]


def test_workers_of_one_machine_share_what_is_free(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path)
    config = config_with([{**UNIFIED, "replicas": 3}], kv_memory_share=0.001)

    plan = plan_worker(config, config.pools[0], folder)

    assert plan.surroundings.num_workers == 3
    assert plan.kv_bytes <= 0.001 * plan.surroundings.free_bytes / 3


def test_more_than_there_is_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path)
    config = config_with(kv_memory_bytes="1000TB")

    with pytest.raises(ConfigError, match=r"do not fit into .*--kv-memory"):
        load_host(config, config.pools[0], folder)


def test_a_model_that_cannot_work_is_refused_before_its_weights_are_looked_for(tmp_path: Path) -> None:
    make_config("bloom").save_pretrained(tmp_path)
    config = config_with()

    with pytest.raises(ModelRefused, match="ALiBi"):
        load_host(config, config.pools[0], tmp_path)


def test_a_gguf_file_is_served(tmp_path: Path) -> None:
    config = config_with(kv_memory_bytes=2**20)

    host = load_host(config, config.pools[0], save_gguf(tmp_path / "tiny.gguf"))

    assert host.context_length == 512


def test_model_plan_prints_a_table_per_pool(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "m")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands, "output", Console(width=200))
        result = CliRunner().invoke(
            commands.app, ["model", "plan", str(folder), "--kv-memory", "3MiB", "--set", "models.0.dtype=float32"]
        )

    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert result.exit_code == 0
    assert [line for line in lines if line.startswith("pool")] == ["pool prefill, 1 worker", "pool decode, 1 worker"]
    assert lines.count("KV 3.0 MiB") == 2
    assert lines.count("context length 512 tokens of prompt and output") == 2


def test_kv_memory_of_the_command_line_goes_before_blocks_of_a_file(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "m")
    file = tmp_path / "app.yaml"
    file.write_text(f"version: 1\nmodels: [{{source: {folder}, kv_num_blocks: 5}}]\n")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands, "output", Console(width=200))
        arguments = ["model", "plan", str(folder), "-c", str(file), "--dtype", "float32", "--kv-memory", "3MiB"]
        result = CliRunner().invoke(commands.app, arguments)

    assert "128 blocks of 24.0 KiB" in result.output


@pytest.mark.skipif(not can_pack(torch.float32, torch.device("cpu")), reason="this machine packs no weights")
@pytest.mark.parametrize(("kind", "is_tied"), [("gemma3", True), ("llama", False)])
def test_a_fused_model_is_planned_with_its_packed_copy_of_a_tied_head(tmp_path: Path, kind: str, is_tied: bool) -> None:
    folder = save_checkpoint(tmp_path, kind)
    plain, fused = (config_with(fuse_layers=fuses) for fuses in (False, True))
    plans = [plan_worker(config, config.pools[0], folder).surroundings.weights_bytes for config in (plain, fused)]
    loaded = {config.model.fuse_layers: load_host(config, config.pools[0], folder).loaded for config in (plain, fused)}

    embedding = loaded[False].model.get_input_embeddings().weight
    assert plans[1] - plans[0] == (embedding.nbytes if is_tied else 0)
    assert not any(isinstance(module, PackedLinear) for module in loaded[False].model.modules())
    assert isinstance(loaded[True].model.get_output_embeddings(), PackedLinear)


@pytest.mark.parametrize(("role", "chunk"), [("prefill", 512), ("decode", 256), ("unified", 256)])
def test_a_prefill_worker_takes_whole_steps_for_one_prompt(tmp_path: Path, role: str, chunk: int) -> None:
    folder = save_checkpoint(tmp_path)
    config = config_with([{"name": "one", "role": role}, {"name": "all", "role": "unified"}])

    assert load_host(config, config.pools[0], folder).limits.max_chunk_tokens == chunk


def test_the_steps_of_a_pool_go_before_those_of_the_model(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path)
    config = config_with([{"name": "one", "role": "unified", "max_batch_tokens": 64, "prefill_chunk_tokens": 48}])

    limits = load_host(config, config.pools[0], folder).limits

    assert (limits.max_step_tokens, limits.max_chunk_tokens) == (64, 48)
