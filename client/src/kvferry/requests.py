"""From the caller's words to the messages of the public contract; what the contract cannot carry is refused here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from kvferry.errors import InvalidRequest
from kvferry.v1 import inference_pb2 as v1

Prompt = str | Sequence[int]
"""Text, or the token ids of the served model's own tokenizer."""
Messages = Sequence[Mapping[str, str]]
"""Turns of a conversation, each with `role` (system, user or assistant) and `content`."""

_TURN_FIELDS = {"role", "content"}


class Sampling(TypedDict, total=False):
    """How tokens are chosen and when generation ends; None or left out is the server's default."""

    max_tokens: int | None
    """Most tokens to generate, >= 1. Default: what the context still holds."""
    temperature: float | None
    """0 is greedy; 0 to 2. Default 1."""
    top_p: float | None
    """Nucleus sampling, in (0, 1]. Default 1."""
    top_k: int | None
    """Sample among the k most likely tokens; 0 (default) means all."""
    seed: int | None
    """Makes sampling repeatable."""
    stop: str | Sequence[str]
    """Strings that end the text; not part of it."""


def make_sampling(
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
) -> v1.SamplingParams:
    """Build the message; the server checks the limits.

    Raises:
        InvalidRequest: A number does not fit its field.
        TypeError: An argument has the wrong type or an unknown name.
    """
    try:
        return v1.SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=[stop] if isinstance(stop, str) else stop,
        )
    except ValueError as error:
        raise InvalidRequest(f"a sampling parameter is out of range: {error}") from error


def make_generate_request(prompt: Prompt, model: str | None, sampling: v1.SamplingParams) -> v1.GenerateRequest:
    """Build the message of one prompt.

    Raises:
        InvalidRequest: A token id is negative or does not fit 32 bits.
    """
    if isinstance(prompt, str):
        return v1.GenerateRequest(model=model or "", text=prompt, sampling=sampling)
    try:
        return v1.GenerateRequest(model=model or "", token_ids=v1.TokenIds(ids=prompt), sampling=sampling)
    except ValueError as error:
        raise InvalidRequest(f"prompt: not a token id: {error}") from error


def make_chat_request(messages: Messages, model: str | None, sampling: v1.SamplingParams) -> v1.ChatRequest:
    """Build the message of one conversation.

    Raises:
        InvalidRequest: A turn lacks `role` or `content`, or has a field that the contract does not know.
    """
    for position, turn in enumerate(messages):
        if set(turn) != _TURN_FIELDS:
            raise InvalidRequest(f"messages[{position}]: needs role and content and nothing else, has {sorted(turn)}")
    turns = [v1.ChatMessage(role=turn["role"], content=turn["content"]) for turn in messages]
    return v1.ChatRequest(model=model or "", messages=turns, sampling=sampling)
