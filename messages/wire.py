"""Dataclasses to and from the internal protobuf messages."""

from collections.abc import Iterable, Sequence

from messages import errors
from messages.handoff import BlockId, BlockKey, BlockRef, Handoff, HandoffId, OpenReply
from messages.requests import Adapter, GenerationRequest, Grammar, GrammarKind, RequestId, SamplingParams
from messages.reuse import PrefixSource, ReuseOffer
from messages.tokens import FinishReason, TokenEvent, TokenLogprob
from messages.v1 import worker_pb2 as pb

BlockGroups = tuple[tuple[BlockRef | None, ...], ...]


def request_to_wire(request: GenerationRequest) -> pb.Request:
    """Stop strings stay behind: the gateway matches them."""
    sampling = request.sampling
    message = pb.Request(
        request_id=request.request_id,
        model=request.model,
        prompt_token_ids=request.prompt_token_ids,
        sampling=pb.SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            n=sampling.n,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=[pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in sampling.logit_bias],
            allowed_token_ids=(
                None if sampling.allowed_token_ids is None else pb.TokenIds(ids=sampling.allowed_token_ids)
            ),
            bad_words=[pb.TokenIds(ids=ids) for ids in sampling.bad_words],
            min_tokens=sampling.min_tokens,
            stop_token_ids=sampling.stop_token_ids,
            end_token_ids=sampling.end_token_ids,
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            grammar=(
                None
                if sampling.grammar is None
                else pb.Grammar(kind=sampling.grammar.kind.value, source=sampling.grammar.source)
            ),
        ),
        salt=request.salt,
        timeout_s=request.timeout_s,
        priority=request.priority,
        generated_token_ids=request.generated_token_ids,
        choice=request.choice,
    )
    if request.adapter is not None:
        message.adapter.name, message.adapter.digest = request.adapter.name, request.adapter.digest
    return message


def request_from_wire(message: pb.Request) -> GenerationRequest:
    """The inverse of `request_to_wire`, without stop strings."""
    sampling = message.sampling
    return GenerationRequest(
        request_id=RequestId(message.request_id),
        model=message.model,
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed if sampling.HasField("seed") else None,
            n=sampling.n,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=tuple((entry.token_id, entry.bias) for entry in sampling.logit_bias),
            allowed_token_ids=(
                tuple(sampling.allowed_token_ids.ids) if sampling.HasField("allowed_token_ids") else None
            ),
            bad_words=tuple(tuple(word.ids) for word in sampling.bad_words),
            min_tokens=sampling.min_tokens,
            stop_token_ids=tuple(sampling.stop_token_ids),
            end_token_ids=tuple(sampling.end_token_ids),
            logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
            prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
            grammar=(
                Grammar(kind=GrammarKind(sampling.grammar.kind), source=sampling.grammar.source)
                if sampling.HasField("grammar")
                else None
            ),
        ),
        salt=message.salt,
        adapter=(
            Adapter(name=message.adapter.name, digest=message.adapter.digest) if message.HasField("adapter") else None
        ),
        timeout_s=message.timeout_s if message.HasField("timeout_s") else None,
        priority=message.priority,
        generated_token_ids=tuple(message.generated_token_ids),
        choice=message.choice,
    )


def request_id_of(message: pb.GatewayMessage) -> RequestId:
    """Which request a gateway's message is about; empty when it has no body."""
    body = message.WhichOneof("body")
    if body is None:
        return RequestId("")
    part = getattr(message, body)
    return RequestId(part.request.request_id if hasattr(part, "request") else part.request_id)


def groups_to_wire(groups: Iterable[Sequence[BlockRef | None]]) -> list[pb.GroupBlocks]:
    """A hole becomes a BlockRef without an id."""
    return [
        pb.GroupBlocks(
            blocks=[pb.BlockRef() if ref is None else pb.BlockRef(block_id=ref.block_id, key=ref.key) for ref in group]
        )
        for group in groups
    ]


def groups_from_wire(groups: Iterable[pb.GroupBlocks]) -> BlockGroups:
    """The inverse of `groups_to_wire`."""
    return tuple(
        tuple(
            BlockRef(block_id=BlockId(ref.block_id), key=BlockKey(ref.key) if ref.HasField("key") else None)
            if ref.HasField("block_id")
            else None
            for ref in group.blocks
        )
        for group in groups
    )


def reuse_to_wire(offer: ReuseOffer) -> pb.ReuseOffer:
    """Field by field."""
    return pb.ReuseOffer(
        sources=[
            pb.PrefixSource(
                worker_id=source.worker_id,
                incarnation=source.incarnation,
                address=source.address,
                num_blocks=source.num_blocks,
            )
            for source in offer.sources
        ],
        min_tokens=offer.min_tokens,
    )


def reuse_from_wire(message: pb.ReuseOffer) -> ReuseOffer:
    """The inverse of `reuse_to_wire`."""
    return ReuseOffer(
        sources=tuple(
            PrefixSource(
                worker_id=source.worker_id,
                incarnation=source.incarnation,
                address=source.address,
                num_blocks=source.num_blocks,
            )
            for source in message.sources
        ),
        min_tokens=message.min_tokens,
    )


def handoff_to_wire(handoff: Handoff) -> pb.Handoff:
    """Field by field."""
    return pb.Handoff(
        handoff_id=handoff.handoff_id,
        worker_id=handoff.worker_id,
        incarnation=handoff.incarnation,
        address=handoff.address,
        fingerprint=handoff.fingerprint,
        num_tokens=handoff.num_tokens,
        groups=groups_to_wire(handoff.groups),
        lease_s=handoff.lease_s,
    )


def handoff_from_wire(message: pb.Handoff) -> Handoff:
    """The inverse of `handoff_to_wire`."""
    return Handoff(
        handoff_id=HandoffId(message.handoff_id),
        worker_id=message.worker_id,
        incarnation=message.incarnation,
        address=message.address,
        fingerprint=message.fingerprint,
        num_tokens=message.num_tokens,
        groups=groups_from_wire(message.groups),
        lease_s=message.lease_s,
    )


def open_reply_from_wire(message: pb.OpenResponse) -> OpenReply:
    """Field by field."""
    return OpenReply(
        generation=message.generation,
        agent_name=message.agent_name,
        agent_metadata=message.agent_metadata,
        group_offsets=tuple(message.group_offsets),
        lease_s=message.lease_s,
    )


def tokens_to_wire(event: TokenEvent) -> pb.Tokens:
    """Field by field."""
    return pb.Tokens(
        request_id=event.request_id,
        choice=event.choice,
        first_index=event.first_index,
        token_ids=event.token_ids,
        finish_reason=event.finish_reason.value if event.finish_reason else "",
        stop_token_id=event.stop_token_id,
        logprobs=[_logprob_to_wire(entry) for entry in event.logprobs],
        prompt_logprobs=[_logprob_to_wire(entry) for entry in event.prompt_logprobs],
    )


def tokens_from_wire(message: pb.Tokens) -> TokenEvent:
    """The inverse of `tokens_to_wire`."""
    return TokenEvent(
        request_id=RequestId(message.request_id),
        choice=message.choice,
        first_index=message.first_index,
        token_ids=tuple(message.token_ids),
        finish_reason=FinishReason(message.finish_reason) if message.finish_reason else None,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        logprobs=tuple(_logprob_from_wire(entry) for entry in message.logprobs),
        prompt_logprobs=tuple(
            _logprob_from_wire(entry) if entry.HasField("logprob") else None for entry in message.prompt_logprobs
        ),
    )


def _logprob_to_wire(entry: TokenLogprob | None) -> pb.TokenLogprob:
    if entry is None:
        return pb.TokenLogprob()
    return pb.TokenLogprob(
        token_id=entry.token_id,
        logprob=entry.logprob,
        top_token_ids=[token_id for token_id, _ in entry.top],
        top_logprobs=[logprob for _, logprob in entry.top],
    )


def _logprob_from_wire(message: pb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(
        token_id=message.token_id,
        logprob=message.logprob,
        top=tuple(zip(message.top_token_ids, message.top_logprobs, strict=True)),
    )


def failed_to_wire(request_id: str, error: errors.ServingError) -> pb.Failed:
    """The error's class travels by name."""
    return pb.Failed(request_id=request_id, error=type(error).__name__, message=str(error))


def error_from_wire(name: str, message: str) -> errors.ServingError:
    """The error class called `name`, or the root when this build does not know it."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, errors.ServingError):
        return kind(message)
    return errors.ServingError(message)
