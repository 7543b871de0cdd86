"""The bytes that each token adds to the text, as the client will see them, for matching a grammar.

A decoder that strips the space at the start of a text (Llama 2, Mistral) gives some tokens other bytes there. Such a
token has a second entry behind all the others, which stands for it as the first token.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from engine.detokenizer import TokenBytes
from engine.grammar_library import MAX_TOKEN_BYTES
from messages.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Tokens that a grammar can see."""

    tokens: tuple[bytes, ...]
    """By token id, then the first-token forms; empty: never allowed."""
    num_tokens: int
    """Token ids; what is behind them in `tokens` are first-token forms."""
    logits_width: int
    """V; ids from `num_tokens` on are never allowed."""
    first_ids: NDArray[np.int64]
    """Token ids with other bytes at the start of a text; their forms are `num_tokens` onward, in this order."""
    end_token_ids: tuple[int, ...]
    """Tokens that end the output; at least one."""

    def first_form(self, token_id: int) -> int:
        """Index into `tokens` that stands for a token at the start of the text."""
        place = int(np.searchsorted(self.first_ids, token_id))
        is_other = place < len(self.first_ids) and int(self.first_ids[place]) == token_id
        return self.num_tokens + place if is_other else token_id


def read_vocabulary(folder: Path, logits_width: int, end_token_ids: frozenset[int]) -> Vocabulary:
    """Read the tokens of a checkpoint's tokenizer.

    Args:
        folder: The checkpoint.
        logits_width: V, entries of the model's logits; may be more or less than the tokenizer's ids.
        end_token_ids: Tokens that end the output.

    Raises:
        ConfigError: The folder has no tokenizer that can be used, or no end token has a logit.
    """
    try:
        backend = AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer
    except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
        raise ConfigError(f"no fast tokenizer in {folder}: {error}", path=str(folder)) from error
    ends = tuple(sorted(token_id for token_id in end_token_ids if 0 <= token_id < logits_width))
    if not ends:
        raise ConfigError("structured output needs an end token, and this model has none", path=str(folder))
    return _vocabulary(backend, logits_width, ends)


def _vocabulary(backend: Any, logits_width: int, ends: tuple[int, ...]) -> Vocabulary:
    controls = {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
    token_bytes = TokenBytes(backend, frozenset(controls))
    ids = backend.get_vocab(with_added_tokens=True)
    num_tokens = min(1 + max(ids.values()), logits_width)
    inside_id = ids.get("a", min(set(ids.values()) - controls))
    tokens, first_ids, first_forms = [b""] * num_tokens, [], []
    for token_id in sorted(set(ids.values()) - controls - set(ends)):
        if token_id >= num_tokens:
            break
        tokens[token_id] = _short(token_bytes.of(token_id, inside_id))
        at_start = _short(token_bytes.of(token_id, None))
        if at_start != tokens[token_id]:
            first_ids.append(token_id)
            first_forms.append(at_start)
    return Vocabulary(
        tokens=(*tokens, *first_forms),
        num_tokens=num_tokens,
        logits_width=logits_width,
        first_ids=np.array(first_ids, dtype=np.int64),
        end_token_ids=ends,
    )


def _short(data: bytes) -> bytes:
    return data if len(data) <= MAX_TOKEN_BYTES else b""
