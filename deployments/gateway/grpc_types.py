"""The messages of kvferry.v1: requests in, chunks out."""

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from deployments.gateway import structured_output
from deployments.gateway.validation import make_spec, role
from deployments.service import (
    ChatTurn,
    Chunk,
    Finish,
    GenerationSpec,
    ModelCard,
    Prompt,
    ScoredToken,
    Summary,
)
from kvferry.v1 import inference_pb2
from messages.errors import InvalidRequest
from messages.requests import Grammar
from messages.tokens import FinishReason

_REASONS = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


def spec_of_generate(request: inference_pb2.GenerateRequest, timeout_s: float | None) -> GenerationSpec:
    """Check a Generate request.

    Raises:
        InvalidRequest: A field is unknown here, missing or out of its limits.
    """
    refuse_unknown_fields(request)
    return make_spec(
        prompt=_prompt(request),
        model=request.model or None,
        sampling=_sampling(request.sampling),
        grammar=_grammar(request.sampling),
        echo=request.echo,
        timeout_s=timeout_s,
    )


def spec_of_chat(request: inference_pb2.ChatRequest, timeout_s: float | None) -> GenerationSpec:
    """Check a Chat request.

    Raises:
        InvalidRequest: A field is unknown here, missing or out of its limits.
    """
    refuse_unknown_fields(request)
    if not request.messages:
        raise InvalidRequest("messages must have at least 1 message", param="messages")
    turns = tuple(
        ChatTurn(
            role=role(message.role, f"messages.{index}.role"),
            content=message.content,
            tool_call_id=message.tool_call_id,
        )
        for index, message in enumerate(request.messages)
    )
    return make_spec(
        prompt=turns,
        model=request.model or None,
        sampling=_sampling(request.sampling),
        grammar=_grammar(request.sampling),
        timeout_s=timeout_s,
    )


def spec_of_explain(request: inference_pb2.ExplainRequest, timeout_s: float | None) -> GenerationSpec:
    """Check the request that is asked about.

    Raises:
        InvalidRequest: There is none, or a field of it is unknown here, missing or out of its limits.
    """
    refuse_unknown_fields(request)
    match request.WhichOneof("request"):
        case "generate":
            return spec_of_generate(request.generate, timeout_s)
        case "chat":
            return spec_of_chat(request.chat, timeout_s)
        case _:
            raise InvalidRequest("request must be generate or chat", param="request")


def refuse_unknown_fields(message: Message) -> None:
    """Raise InvalidRequest for a field that a newer client set, here or in a message inside; ignoring it would lie."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        name, number = message.DESCRIPTOR.full_name, unknown[0].field_number
        raise InvalidRequest(f"unsupported field number {number} of {name}", param=f"{name}:{number}")
    for field, value in message.ListFields():
        kind = field.message_type
        if kind is None or kind.GetOptions().map_entry:
            continue
        for inner in [value] if isinstance(value, Message) else value:
            refuse_unknown_fields(inner)


def _prompt(request: inference_pb2.GenerateRequest) -> Prompt:
    if request.WhichOneof("prompt") == "token_ids":
        prompt: Prompt = tuple(request.token_ids.ids)
    else:
        prompt = request.text
    if not prompt:
        raise InvalidRequest("prompt must not be empty; send text or token_ids", param="prompt")
    return prompt


def _sampling(params: inference_pb2.SamplingParams) -> dict[str, object]:
    given: dict[str, object] = {field.name: value for field, value in params.ListFields() if field.name != "grammar"}
    for name in ("stop", "bad_words", "stop_token_ids"):
        if name in given:
            given[name] = list(getattr(params, name))
    if "logit_bias" in given:
        given["logit_bias"] = dict(params.logit_bias)
    if "allowed_token_ids" in given:
        given["allowed_token_ids"] = list(params.allowed_token_ids.ids)
    return given


def _grammar(params: inference_pb2.SamplingParams) -> Grammar | None:
    if not params.HasField("grammar"):
        return None
    grammar = params.grammar
    match grammar.WhichOneof("kind"):
        case "json_schema":
            return structured_output.json_schema(grammar.json_schema, "grammar.json_schema")
        case "json_object":
            return structured_output.json_object()
        case "regex":
            return structured_output.regex(grammar.regex, "grammar.regex")
        case "choice":
            return structured_output.choice(list(grammar.choice.texts), "grammar.choice")
        case _:
            raise InvalidRequest("grammar must have json_schema, json_object, regex or choice", param="grammar")


def chunk_message(chunk: Chunk) -> inference_pb2.GenerateChunk:
    """A chunk for the wire."""
    return inference_pb2.GenerateChunk(
        request_id=chunk.request_id,
        choice=chunk.choice,
        text=chunk.text,
        token_ids=chunk.token_ids,
        logprobs=[_logprob_message(token) for token in chunk.logprobs],
        prompt_logprobs=[_logprob_message(token) for token in chunk.prompt_logprobs],
        finish=None if chunk.finish is None else _finish_message(chunk.finish),
        summary=None if chunk.summary is None else _summary_message(chunk.summary),
    )


def _logprob_message(token: ScoredToken | None) -> inference_pb2.TokenLogprob:
    if token is None:
        return inference_pb2.TokenLogprob()
    return inference_pb2.TokenLogprob(
        token_id=token.token_id,
        logprob=token.logprob,
        text=token.text,
        text_bytes=token.data,
        top=[_logprob_message(other) for other in token.top],
    )


def _finish_message(finish: Finish) -> inference_pb2.Finish:
    reason = _REASONS[finish.reason]
    if isinstance(finish.stop, str):
        return inference_pb2.Finish(reason=reason, stop_string=finish.stop)
    if finish.stop is not None:
        return inference_pb2.Finish(reason=reason, stop_token_id=finish.stop)
    return inference_pb2.Finish(reason=reason)


def _summary_message(summary: Summary) -> inference_pb2.Summary:
    usage, provenance = summary.usage, summary.provenance
    return inference_pb2.Summary(
        usage=inference_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        ),
        provenance=inference_pb2.Provenance(
            prefill_worker=provenance.prefill_worker,
            decode_worker=provenance.decode_worker,
            prefill_computed_tokens=provenance.prefill_computed_tokens,
            decode_computed_tokens=provenance.decode_computed_tokens,
            blocks_moved=provenance.blocks_moved,
            bytes_moved=provenance.bytes_moved,
            transfer_seconds=provenance.transfer_s,
            exposed_seconds=provenance.exposed_s,
            reused_from=provenance.reused_from,
            reused_tokens=provenance.reused_tokens,
            replays=provenance.num_replays,
        ),
        timings=inference_pb2.Timings(first_token_seconds=summary.first_token_s, total_seconds=summary.total_s),
    )


def models_message(cards: list[ModelCard]) -> inference_pb2.ModelsResponse:
    """The served models for the wire."""
    models = [inference_pb2.Model(name=card.name, context_length=card.context_length) for card in cards]
    return inference_pb2.ModelsResponse(models=models)
