"""Workers and their blocks as routing decisions see them, and decisions as workers see them."""

from collections.abc import Mapping, Sequence

from cluster.reuse import GroupBytes, ReusePlan, WorkerRates
from cluster.routing import WorkerView
from deployments.worker_links import WorkerLink
from kv_store.block_key import KeyExtras, block_keys, root_key
from kv_store.registry.protocol import WorkerRecord
from messages.handoff import BlockKey
from messages.requests import GenerationRequest
from messages.reuse import PrefixSource, ReuseOffer
from messages.v1 import worker_pb2 as pb


def prompt_keys(request: GenerationRequest, record: WorkerRecord) -> list[BlockKey]:
    """Keys of a prompt's full blocks on workers like this one."""
    extras = KeyExtras(
        model=record.key_model,
        block_size=record.block_size,
        codec=record.key_codec,
        adapter=request.adapter,
        salt=request.salt,
    )
    return block_keys(root_key(extras), request.prompt_token_ids, record.block_size)


def view_of(link: WorkerLink, cached_tokens: int) -> WorkerView:
    """A live worker by its newest heartbeat."""
    load = link.load
    assert load is not None, "a live link has a load"
    free = min((group.free_blocks + group.cached_blocks for group in load.groups), default=0)
    return WorkerView(
        worker_id=link.record.worker_id,
        pool=link.record.pool,
        cached_tokens=cached_tokens,
        queued_prefill_tokens=load.queued_prefill_tokens,
        running=load.running,
        waiting=load.waiting,
        free_tokens=free * link.record.block_size,
        fingerprint=link.record.fingerprint,
        rates=_rates(load.rates),
    )


def offer_of(plan: ReusePlan, hits: Mapping[str, int], live: Sequence[WorkerRecord]) -> ReuseOffer:
    """Say where a plan's sources are; those that went away are left out.

    Args:
        plan: What was decided.
        hits: Cached tokens by worker id.
        live: Workers that take requests.
    """
    by_id = {record.worker_id: record for record in live}
    records = [by_id[worker_id] for worker_id in plan.sources if worker_id in by_id]
    return ReuseOffer(
        sources=tuple(
            PrefixSource(
                worker_id=record.worker_id,
                incarnation=record.incarnation,
                address=record.address,
                num_blocks=hits.get(record.worker_id, 0) // record.block_size,
            )
            for record in records
        ),
        min_tokens=plan.min_tokens,
    )


def _rates(message: pb.Rates) -> WorkerRates:
    return WorkerRates(
        prefill_tokens_s=message.prefill_tokens_s if message.HasField("prefill_tokens_s") else None,
        transfer_bytes_s=message.transfer_bytes_s if message.HasField("transfer_bytes_s") else None,
        groups=tuple(
            GroupBytes(token_bytes=group.token_bytes, window=group.window if group.HasField("window") else None)
            for group in message.groups
        ),
    )
