"""Workers and their blocks as placements see them, and placements as workers see them."""

from collections.abc import Mapping, Sequence

from cluster.reuse import GroupBytes, ReusePlan, WorkerRates
from cluster.snapshot import WorkerFacts, WorkerLoad
from cluster.step_time import StepTimes
from deployments.worker_links import WorkerLink
from kv_store.block_key import KeyExtras, block_keys, root_key
from kv_store.registry.protocol import WorkerRecord
from messages.handoff import BlockKey
from messages.requests import GenerationRequest
from messages.reservations import Admitted
from messages.reuse import PrefixSource, ReuseOffer
from messages.v1 import worker_pb2 as pb


def prompt_keys(request: GenerationRequest, record: WorkerRecord) -> list[BlockKey]:
    """Keys of the full blocks of a prompt, and of what a replay brings, on workers like this one."""
    extras = KeyExtras(
        model=record.key_model,
        block_size=record.block_size,
        codec=record.key_codec,
        adapter=request.adapter,
        salt=request.salt,
    )
    return block_keys(root_key(extras), request.known_token_ids, record.block_size)


def facts_of(link: WorkerLink) -> WorkerFacts:
    """What stays the same in this life of a worker."""
    record, welcome = link.record, link.welcome
    assert welcome is not None, "a live link was welcomed"
    return WorkerFacts(
        worker_id=record.worker_id,
        incarnation=record.incarnation,
        pool=record.pool,
        fingerprint=record.fingerprint,
        step_tokens=welcome.step_tokens,
        chunk_tokens=welcome.chunk_tokens,
    )


def load_of(load: pb.Load, block_size: int) -> WorkerLoad:
    """What a heartbeat says; of several KV groups the one with the least room counts."""
    times = load.times
    return WorkerLoad(
        queued_prefill_tokens=load.queued_prefill_tokens,
        running=load.running,
        waiting=load.waiting,
        context_tokens=load.context_tokens,
        free_tokens=block_size * min((group.free_blocks + group.cached_blocks for group in load.groups), default=0),
        total_tokens=block_size * min((group.total_blocks for group in load.groups), default=0),
        rates=_rates(load.rates),
        times=StepTimes(
            base_ms=times.base_ms,
            prefill_token_ms=times.prefill_token_ms,
            decode_token_ms=times.decode_token_ms,
            context_token_ms=times.context_token_ms,
        )
        if load.HasField("times")
        else None,
        admitted=tuple(
            Admitted(issuer=seen.issuer, through=seen.through, beyond=tuple(seen.beyond)) for seen in load.admitted
        ),
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
