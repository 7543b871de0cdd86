"""A small byte-level tokenizer, matchers for it, and a driver that samples at random through their masks."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer
from transformers import PreTrainedTokenizerFast

from engine.grammar_library import make_tokenizer, start
from engine.grammar_matcher import GrammarMatcher
from engine.grammar_source import library_source
from engine.grammar_vocabulary import Vocabulary, read_vocabulary
from engine.tokenizer import Tokenizer
from messages.requests import Grammar, GrammarKind

END, START = "<|end|>", "<|start|>"
WIDTH = 400
"""Entries of the logits, more than the tokenizer has."""
_WORDS = ('{"', '":', '",', '"}', "true", "null", "te", "test", "ing", "12", "-1", " a", "é", "日", "😀", "\n ", "]]")


def make_folder(folder: Path) -> Path:
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        (spelled, _), *_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(word)
        for end in range(1, len(spelled)):
            if spelled[: end + 1] not in vocabulary:
                merges.append((spelled[:end], spelled[end]))
                vocabulary[spelled[: end + 1]] = len(vocabulary)
    backend = BackendTokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([START, END])
    backend.add_tokens([AddedToken("<think>")])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END).save_pretrained(folder)
    return folder


def make_stripping_folder(folder: Path) -> Path:
    """A tokenizer whose decoder takes a space off the start of the text, as Llama 2's does."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"abc▁", "▁a", "▁▁", "▁abc"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = BackendTokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "</s>"])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(folder)
    return folder


@cache
def tiny() -> tuple[Vocabulary, Tokenizer]:
    with TemporaryDirectory() as folder:
        tokenizer = Tokenizer.load(make_folder(Path(folder)))
        return read_vocabulary(Path(folder), WIDTH, tokenizer.eos_ids), tokenizer


@cache
def _indexed(vocabulary_of: object) -> object:
    return make_tokenizer(tiny()[0].tokens)


def make_matcher(kind: GrammarKind, source: str = "", vocabulary: Vocabulary | None = None) -> GrammarMatcher:
    tokenizer = _indexed(tiny) if vocabulary is None else make_tokenizer(vocabulary.tokens)
    state = start(tokenizer, library_source(Grammar(kind=kind, source=source), 64 << 10))
    return GrammarMatcher(vocabulary or tiny()[0], tokenizer, state)


def allowed_ids(matcher: GrammarMatcher, width: int = WIDTH) -> list[int]:
    mask = torch.rand(width) > 0.5
    matcher.fill_mask(mask)
    return [int(token_id) for token_id in mask.nonzero()[:, 0]]


def sample(matcher: GrammarMatcher, seed: int, *, patience: int = 40, limit: int = 3000) -> list[int]:
    """Draw tokens until the output ends; after `patience` of them take whatever closes something."""
    draw = np.random.default_rng(seed)
    vocabulary, _ = tiny()
    closing = [vocabulary.tokens.index(text) for text in (b'"', b"}", b"]", b",", b":")]
    token_ids: list[int] = []
    while not matcher.is_finished:
        assert len(token_ids) < limit, "the output never ends"
        choices = allowed_ids(matcher)
        wanted = [*vocabulary.end_token_ids, *closing] if len(token_ids) > patience else []
        token_id = next((token for token in wanted if token in choices), None) or int(draw.choice(choices))
        matcher.accept(token_id)
        token_ids.append(token_id)
    return token_ids


def text_of(token_ids: Sequence[int]) -> str:
    text = tiny()[1].decode(token_ids)
    assert "\ufffd" not in text
    return text


def mask_of(matcher: GrammarMatcher) -> list[bool]:
    mask = torch.from_numpy(np.ones(WIDTH, dtype=np.bool_))
    matcher.fill_mask(mask)
    result: list[bool] = mask.tolist()
    return result
