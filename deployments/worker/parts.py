"""Makes the parts of a worker that are real in production: model, NIXL, Redis."""

from deployments.config import AppConfig, PoolConfig
from deployments.model_source import resolve_model
from deployments.registry_client import make_registry
from deployments.worker.garbage import set_loaded_objects_aside
from deployments.worker.model_host import load_host
from deployments.worker.runtime import RegistryCounts, WorkerParts, agent_name
from kv_store.registry.shard import ShardHooks
from kv_store.transfer.nixl import NixlTransport
from kv_store.transfer.protocol import BlockTransport
from kv_store.transfer.same_host import SameHostTransport
from messages.faults import Faults


def make_parts(config: AppConfig, pool: PoolConfig, worker_id: str, faults: Faults) -> WorkerParts:
    """Load the model and open the ways to other processes; blocks for seconds.

    The process must then end by `os._exit`: one that made a NIXL agent crashes in its exit handlers.
    """
    model = load_host(config, pool, resolve_model(config.model.source), faults)
    arena = model.arena
    transport: BlockTransport = NixlTransport(agent_name(worker_id), arena.buffer)
    if arena.shared is not None:
        transport = SameHostTransport(transport, arena.buffer, arena.shared)
    counts = RegistryCounts()
    parts = WorkerParts(
        model=model,
        transport=transport,
        registry=make_registry(config.registry, ShardHooks(on_failure=counts.add_failure, on_stale=counts.add_stale)),
        registry_counts=counts,
        grammars=model.make_grammars(),
        faults=faults,
    )
    set_loaded_objects_aside()
    return parts
