"""Builds a worker's engine: weights, arena, prefix cache, runner and step loop, checked before it takes work."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from deployments.config import AppConfig, ModelConfig, PoolConfig
from deployments.devices import resolve_dtype
from engine.events import StepOutput
from engine.loop import EngineLoop
from engine.model_runner import ModelRunner, configure_threads
from engine.probe import probe
from engine.scheduler import Scheduler, SchedulerLimits
from engine.weights import LoadedModel, dtype_named, kv_layout, load_model
from kv_store.block_key import KeyExtras
from kv_store.layout import Arena, BlockLayout
from kv_store.local_cache import LocalCache
from messages.errors import ConfigError
from messages.requests import GenerationRequest
from telemetry.step_record import StepRecord

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHost:
    """A loaded, probed model with its KV memory."""

    loaded: LoadedModel
    layout: BlockLayout
    arena: Arena
    num_blocks: tuple[int, ...]
    context_length: int
    limits: SchedulerLimits

    def extras(self, request: GenerationRequest) -> KeyExtras:
        """What the request's block keys say besides its tokens."""
        return KeyExtras(
            model=self.loaded.digest,
            block_size=self.layout.block_size,
            codec=self.codec,
            adapter=request.adapter,
            salt=request.salt,
        )

    @property
    def codec(self) -> str:
        """Codec names of all groups, for block keys."""
        return "+".join(group.codec for group in self.layout.groups)

    def make_engine(
        self, sink: Callable[[StepOutput], None], on_step: Callable[[StepRecord], None] | None = None
    ) -> EngineLoop:
        """An engine over this memory; `sink` and `on_step` are called on its thread."""
        cache = LocalCache(self.layout, self.num_blocks)
        runner = ModelRunner(self.loaded, self.arena)
        return EngineLoop(Scheduler(cache, self.limits), cache, runner, self, sink, on_step)


def load_host(config: AppConfig, pool: PoolConfig, folder: Path) -> ModelHost:
    """Load the model of `config` for a worker of `pool`; blocks for seconds.

    Raises:
        ConfigError: The memory for KV is too small for one request.
        ModelRefused: The model cannot be served right.
    """
    _bind_to_cores(pool)
    model = config.model
    device = torch.device("cuda" if pool.num_gpus > 0 else "cpu")
    dtype = dtype_named(resolve_dtype(model.dtype, on_gpu=device.type == "cuda"))
    loaded = load_model(folder, dtype, device)
    probe(loaded)
    layout = kv_layout(loaded.config, dtype, model.block_size, loaded.digest)
    num_blocks = _num_blocks(model, layout)
    context_length = min(model.context_length or loaded.context_length, loaded.context_length)
    most = min(num_blocks) * model.block_size
    if most < 2 * model.block_size:
        raise ConfigError(f"models.0.kv_memory_bytes holds {most} tokens of KV; give it more")
    arena = Arena(layout, num_blocks, device)
    log.info("model.loaded digest=%s num_blocks=%s arena_bytes=%d", loaded.digest, num_blocks, arena.buffer.numel())
    return ModelHost(
        loaded=loaded,
        layout=layout,
        arena=arena,
        num_blocks=num_blocks,
        context_length=min(context_length, most),
        limits=SchedulerLimits(
            block_size=model.block_size,
            max_step_tokens=model.max_batch_tokens,
            max_chunk_tokens=model.prefill_chunk_tokens,
            max_running=model.max_running,
            max_waiting=config.limits.max_queue,
            context_length=min(context_length, most),
        ),
    )


def _num_blocks(model: ModelConfig, layout: BlockLayout) -> tuple[int, ...]:
    if model.kv_num_blocks is not None:
        return (model.kv_num_blocks,) * len(layout.groups)
    per_block = sum(layout.block_bytes(group) for group in range(len(layout.groups)))
    return (model.kv_memory_bytes // per_block,) * len(layout.groups)


def _bind_to_cores(pool: PoolConfig) -> None:
    if pool.cpu_affinity:
        os.sched_setaffinity(0, pool.cpu_affinity)
    if pool.nice:
        os.nice(pool.nice)
    configure_threads(pool.threads(len(os.sched_getaffinity(0))))
