"""Builds a worker's engine: weights, arena, prefix cache, runner and step loop, checked before it takes work."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from deployments.config import AppConfig, PoolConfig
from deployments.devices import device_for, resolve_dtype
from deployments.worker.cores import bind_process
from deployments.worker.memory import plan_worker
from engine.admission import SchedulerLimits
from engine.events import StepOutput
from engine.fused_layers import fuse_layers
from engine.grammar import GrammarCompiler
from engine.loop import EngineLoop
from engine.model_runner import ModelRunner, configure_threads
from engine.probe import probe
from engine.runner_faults import with_faults
from engine.scheduler import Scheduler
from engine.weights import LoadedModel, dtype_named, kv_layout, load_model
from kv_store.block_key import KeyExtras
from kv_store.layout import Arena, BlockLayout
from kv_store.local_cache import LocalCache
from messages.faults import NO_FAULTS, Faults
from messages.requests import GenerationRequest
from telemetry.step_record import StepRecord

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHost:
    """A loaded, probed model with its KV memory."""

    source: Path
    """Folder of the checkpoint, or its GGUF file."""
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

    def make_grammars(self) -> GrammarCompiler:
        """A compiler of grammars over this model's vocabulary."""
        return GrammarCompiler(self.source, int(self.loaded.config.vocab_size), self.loaded.eos_token_ids)

    def make_engine(
        self,
        sink: Callable[[StepOutput], None],
        on_step: Callable[[StepRecord], None] | None = None,
        faults: Faults = NO_FAULTS,
    ) -> EngineLoop:
        """An engine over this memory; `sink` and `on_step` are called on its thread."""
        cache = LocalCache(self.layout, self.num_blocks)
        runner = with_faults(ModelRunner(self.loaded, self.arena), faults)
        return EngineLoop(Scheduler(cache, self.limits), cache, runner, self, sink, on_step)


def load_host(config: AppConfig, pool: PoolConfig, model: Path, faults: Faults = NO_FAULTS) -> ModelHost:
    """Load the model of `config` for a worker of `pool`; blocks for seconds.

    Args:
        config: The whole deployment.
        pool: The worker's own.
        model: Folder of the checkpoint, or its GGUF file.
        faults: What is to go wrong.

    Raises:
        ConfigError: The checkpoint is broken, or the memory is too small.
        ModelRefused: The model cannot be served right.
    """
    num_cores = bind_process(pool.cpu_affinity, pool.nice)
    configure_threads(pool.threads(num_cores))
    settings = config.model
    plan = plan_worker(config, pool, model)
    log.info("memory.planned\n%s", plan.table())
    device = torch.device(device_for(pool.num_gpus))
    dtype = dtype_named(resolve_dtype(settings.dtype, on_gpu=device.type == "cuda"))
    loaded = load_model(model, dtype, device, context_length=settings.context_length, progress=StageLog())
    if settings.fuse_layers:
        log.info("model.fused %s", fuse_layers(loaded))
    probe(loaded)
    layout = kv_layout(loaded.config, dtype, settings.block_size, loaded.digest)
    arena = Arena(layout, plan.num_blocks, device, is_shared=config.handoff.same_host)
    log.info("model.loaded digest=%s num_blocks=%s arena_bytes=%d", loaded.digest, plan.num_blocks, arena.bytes_total)
    return ModelHost(
        source=model,
        loaded=loaded,
        layout=layout,
        arena=arena,
        num_blocks=plan.num_blocks,
        context_length=plan.context_length,
        limits=SchedulerLimits(
            block_size=settings.block_size,
            max_step_tokens=config.batch_tokens(pool),
            max_chunk_tokens=config.chunk_tokens(pool),
            max_running=settings.max_running,
            max_waiting=config.limits.max_queue,
            context_length=plan.context_length,
            preempts_each_once=faults.has("engine.preempt_once"),
        ),
    )


class StageLog:
    """Logs each stage of a load, and each quarter of it."""

    def __init__(self) -> None:
        self._last: tuple[str, int] | None = None

    def __call__(self, stage: str, fraction: float) -> None:
        """Take note of the progress."""
        quarter = int(fraction * 4)
        if self._last != (stage, quarter):
            self._last = stage, quarter
            log.info("model.loading stage=%r percent=%d", stage, quarter * 25)
