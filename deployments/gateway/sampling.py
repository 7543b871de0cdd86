"""From a client's words to what the workers sample by; limits that need the vocabulary or the context are checked."""

import secrets
from collections.abc import Iterable

from deployments.service import GenerationSpec
from engine.tokenizer import Tokenizer
from messages.errors import InvalidRequest
from messages.requests import SamplingParams


def make_sampling(
    spec: GenerationSpec, tokenizer: Tokenizer, *, prompt_tokens: int, context_length: int
) -> SamplingParams:
    """Build the parameters of one request.

    Raises:
        InvalidRequest: A token id is not in the vocabulary, or prompt and output do not fit the context.
    """
    check_ids((token_id for token_id, _ in spec.logit_bias), tokenizer.vocab_size, "logit_bias")
    check_ids(spec.allowed_token_ids or (), tokenizer.vocab_size, "allowed_token_ids")
    check_ids(spec.stop_token_ids, tokenizer.vocab_size, "stop_token_ids")
    max_tokens = _max_tokens(spec.max_tokens, prompt_tokens, context_length)
    if spec.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {spec.min_tokens}, but only {max_tokens} tokens can be generated", param="min_tokens"
        )
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=spec.min_tokens,
        n=spec.n,
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        min_p=spec.min_p,
        seed=spec.seed if spec.seed is not None else secrets.randbits(63),
        presence_penalty=spec.presence_penalty,
        frequency_penalty=spec.frequency_penalty,
        repetition_penalty=spec.repetition_penalty,
        logit_bias=spec.logit_bias,
        allowed_token_ids=spec.allowed_token_ids,
        bad_words=bad_words(spec.bad_words, tokenizer),
        stop=spec.stop,
        end_token_ids=() if spec.ignore_eos else tuple(sorted(tokenizer.eos_ids)),
        stop_token_ids=spec.stop_token_ids,
        logprobs=spec.logprobs,
        prompt_logprobs=spec.prompt_logprobs,
        grammar=spec.grammar,
    )


def check_ids(token_ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequest for the first id that no token has, added tokens included."""
    unknown = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
    if unknown is not None:
        message = f"{param}: token id {unknown} is not in the vocabulary, whose ids are 0..{vocab_size - 1}"
        raise InvalidRequest(message, param=param)


def bad_words(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences of words at the start of a text and after a space; most vocabularies tell the two apart.

    Raises:
        InvalidRequest: A word has no tokens.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        for variant in (word,) if not bare else (bare, f" {bare}"):
            token_ids = tuple(tokenizer.encode_inside(variant, "bad_words"))
            if not token_ids:
                raise InvalidRequest("bad_words has a word without tokens", param="bad_words")
            sequences[token_ids] = None
    return tuple(sequences)


def _max_tokens(wanted: int | None, prompt_tokens: int, context_length: int) -> int:
    room = context_length - prompt_tokens
    if room < 1:
        raise InvalidRequest(
            f"the prompt has {prompt_tokens} tokens; the context of {context_length} holds no more", param="prompt"
        )
    if wanted is None:
        return room
    if wanted < 1:
        raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
    if wanted > room:
        raise InvalidRequest(
            f"max_tokens is {wanted}, but the context of {context_length} holds {room} after a prompt of "
            f"{prompt_tokens} tokens",
            param="max_tokens",
        )
    return wanted
