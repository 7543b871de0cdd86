"""The grammar library behind a narrow door: the same limits and the same work here and in the trial process.

Source: llguidance, an Earley parser over lazily built derivatives of regular expressions. No torch in here, since
the trial process imports this.
"""

import re
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

MAX_TOKEN_BYTES = 255
"""The library knows no longer tokens."""
_END_TOKEN = b"\xff<end>"
# A state takes one or two kilobytes, and every request has its own. The fuel lasts for some 40 ms of one mask, which
# `(\w+ ?){1,200}` needs and the library's default does not give.
_LIMITS = LLParserLimits(max_lexer_states=20_000, step_lexer_fuel=500_000, verbose_errors=False)
_MAX_REASON_CHARACTERS = 200
# Only the text tells; a test sees when it changes.
_NOT_ALLOWED = "doesn't satisfy the grammar"
_PLACE = re.compile(r"^at \d+\(\d+\): ")
_WRAPPINGS = ("failed to compile JSON schema: ", 'failed to parse "%json": ', "Parser Error: ")


class _TokenTable:
    """Bytes of every token, in the shape that the library reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = [*tokens, _END_TOKEN]
        self.eos_token_id = len(tokens)
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, _text: bytes) -> list[int]:
        # Asked only to force tokens, which our grammars switch off.
        return []


def make_tokenizer(tokens: Sequence[bytes]) -> LLTokenizer:
    """Index a vocabulary.

    Args:
        tokens: Bytes per token id, at most 255 each; empty for one that a grammar never allows. One id more is the end.
    """
    return LLTokenizer(_TokenTable(tokens))  # type: ignore[arg-type]  # the library looks at attributes only


def start(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """Compile a grammar, compute its first mask, which builds what all its requests need, and look one token ahead.

    Raises:
        ValueError: The grammar is wrong, too complex, or matches nothing; the message is one short phrase.
    """
    state = LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)
    if not state.is_error():
        first = np.flatnonzero(next_tokens(state, tokenizer)[:-1])
        # Too many optional properties are seen only behind the brace.
        ahead = state.deep_copy()
        if len(first) and (not ahead.consume_token(int(first[0])) or has_given_up(ahead)):
            raise ValueError(reason_of(ahead))
    if state.is_error():
        raise ValueError(reason_of(state))
    return state


def next_tokens(state: LLMatcher, tokenizer: LLTokenizer) -> NDArray[np.uint8]:
    """Which tokens may come next.

    Returns:
        (number of tokens + 1,), 0 or 1; the last one is the end. Worth nothing if `state.is_error()` after it.
    """
    num_tokens = tokenizer.vocab_size
    words = np.zeros((num_tokens + 31) // 32, dtype=np.uint32)
    state.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    return np.unpackbits(words.view(np.uint8), count=num_tokens, bitorder="little")


def has_given_up(state: LLMatcher) -> bool:
    """Whether a limit of the library ended a state, and not a token that the grammar does not allow."""
    return state.is_error() and _NOT_ALLOWED not in state.get_error()


def reason_of(state: LLMatcher) -> str:
    """Why a state is in error, as one short phrase."""
    lines = [line.strip() for line in state.get_error().splitlines()]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    reason = _PLACE.sub("", told[0] if told else lines[0])
    for wrapping in _WRAPPINGS:
        reason = reason.removeprefix(wrapping)
    if reason.startswith("NoExtension"):
        reason = "nothing matches it"
    elif reason.startswith("Current row has"):
        reason = "too many alternatives at one place, such as optional properties"
    return reason[:_MAX_REASON_CHARACTERS]
