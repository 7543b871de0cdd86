"""Tokens to text, piece by piece: every token has bytes, and bytes become text at whole code points.

Working on bytes instead of on re-decoded windows makes a push cost the tokens pushed and nothing more, whatever
came before. A code point that bytes never complete becomes U+FFFD, as in any lossy UTF-8 decoder. One difference
from the tokenizer's own decode follows: byte-fallback vocabularies (Llama 2, Gemma) replace a whole run of byte
tokens when any byte of it is wrong; here the code points before the wrong byte stay, since they were shown already.
"""

import codecs
import json
import re
from collections.abc import Iterable

from tokenizers import Tokenizer as BackendTokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes that each token adds to the text; shared by all requests of one tokenizer."""

    def __init__(self, backend: BackendTokenizer, skip_ids: frozenset[int]) -> None:
        self._backend = backend
        self._skip_ids = skip_ids
        kinds = _decoder_kinds(backend)
        self._has_byte_fallback = "ByteFallback" in kinds
        # A byte-level vocabulary needs no context, so one look-up per id is enough.
        self._by_id: dict[int, bytes] | None = {} if "ByteLevel" in kinds else None

    def is_skipped(self, token_id: int) -> bool:
        """Whether the token is a control token, which is no text."""
        return token_id in self._skip_ids

    def of(self, token_id: int, previous_id: int | None) -> bytes:
        """Bytes of `token_id` after `previous_id` (None: at the start of the text); empty for an unknown id."""
        if self._by_id is None:
            return self._in_context(token_id, previous_id)
        data = self._by_id.get(token_id)
        if data is None:
            data = self._by_id[token_id] = self._byte_level(token_id)
        return data

    def _byte_level(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(_BYTE_OF_CHARACTER[character] for character in token)
        except KeyError:
            return token.encode()  # an added token, kept as plain text

    def _in_context(self, token_id: int, previous_id: int | None) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        byte = _BYTE_TOKEN.fullmatch(token) if self._has_byte_fallback else None
        value = int(byte.group(1), 16) if byte is not None else None
        # The start of a text may strip a space, which only the tokenizer's decoder knows.
        if value is not None and (previous_id is not None or value >= 0x80):
            return bytes([value])
        if previous_id is None:
            return self._decode([token_id]).encode()
        return self._decode([previous_id, token_id])[len(self._decode([previous_id])) :].encode()

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=False))


class IncrementalDetokenizer:
    """The text of one growing token sequence; what was given out never changes."""

    def __init__(self, token_bytes: TokenBytes, after: int | None = None) -> None:
        self._token_bytes = token_bytes
        # A control token is no text, so what follows it is the start of one.
        self._previous_id = None if after is None or token_bytes.is_skipped(after) else after
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens and return the text that is new and complete; an unfinished code point waits for its rest."""
        data = bytearray()
        for token_id in token_ids:
            if self._token_bytes.is_skipped(token_id):
                continue
            data += self._token_bytes.of(token_id, self._previous_id)
            self._previous_id = token_id
        return self._utf8.decode(bytes(data))

    def flush(self) -> str:
        """Return what the end of the sequence leaves over: nothing, or U+FFFD for an unfinished code point."""
        return self._utf8.decode(b"", final=True)


def _decoder_kinds(backend: BackendTokenizer) -> frozenset[str]:
    spec = json.loads(backend.to_str())["decoder"] or {}
    stages = spec.get("decoders", [spec])
    return frozenset(str(stage.get("type")) for stage in stages)


def _byte_characters() -> dict[str, int]:
    """The printable stand-in that byte-level BPE uses for each byte.

    Source: GPT-2, Radford et al. 2019: printable Latin-1 stands for itself, the rest for U+0100 onward.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(rest)}


_BYTE_OF_CHARACTER = _byte_characters()
