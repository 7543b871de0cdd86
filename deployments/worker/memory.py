"""The memory that one worker of a pool will use, planned from the config and the headers of the checkpoint."""

from pathlib import Path

import torch

from deployments.config import AppConfig, PoolConfig
from deployments.devices import device_for, resolve_dtype
from engine.fused_layers import packed_head_bytes
from engine.memory_plan import KvSize, MemoryPlan, Residence, Surroundings, free_bytes, plan_memory
from engine.model_support import refuse_unsupported
from engine.weights import dtype_named, kv_layout, memory_needed_bytes, read_config


def plan_worker(config: AppConfig, pool: PoolConfig, model: Path) -> MemoryPlan:
    """Plan a worker of `pool` on this machine, as it is now, before the weights are loaded.

    Args:
        config: The whole deployment.
        pool: One of its pools.
        model: Folder of the checkpoint, or its GGUF file.

    Raises:
        ConfigError: The checkpoint is broken, or weights and KV do not fit.
        ModelRefused: The model is known not to work.
    """
    settings, device = config.model, torch.device(device_for(pool.num_gpus))
    on_gpu = device.type == "cuda"
    dtype = dtype_named(resolve_dtype(settings.dtype, on_gpu=on_gpu))
    whole = read_config(model)
    refuse_unsupported(whole)
    text = whole.get_text_config()
    longest = int(text.max_position_embeddings)
    return plan_memory(
        Surroundings(
            device=str(device),
            free_bytes=free_bytes(device),
            weights_bytes=memory_needed_bytes(model, dtype)
            + (packed_head_bytes(text, dtype, device) if settings.fuse_layers else 0),
            num_workers=_sharers(config, pool),
        ),
        kv_layout(text, dtype, settings.block_size, digest=""),
        KvSize(
            num_blocks=settings.kv_num_blocks, num_bytes=settings.kv_bytes(on_gpu=on_gpu), share=settings.kv_share()
        ),
        Residence(
            context_length=min(settings.context_length or longest, longest), keeps_prompts=pool.role == "prefill"
        ),
    )


def _sharers(config: AppConfig, pool: PoolConfig) -> int:
    """Workers that may have to share this one's device: those of its GPU, or all CPU workers at most."""
    if pool.num_gpus > 0:
        return max(1, int(1 / pool.num_gpus))
    return sum(other.replicas for other in config.pools if other.num_gpus == 0)
