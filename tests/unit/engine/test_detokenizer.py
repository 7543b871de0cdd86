"""Pieces of text add up to the whole, and no piece splits a code point."""

import functools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.detokenizer import IncrementalDetokenizer, TokenBytes

CORPUS = ["hello world, héllo wörld", "日本語のテキスト", "😀😃👩‍👩‍👧", "tabs\tand\nnewlines  and  spaces"]
SPECIAL_IDS = frozenset({0, 1})


@functools.cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 5, trainer)
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("two words"), AddedToken("日本")])
    return tokenizer


@functools.cache
def byte_fallback() -> Tokenizer:
    pieces = ["▁", "▁hello", "▁world", "h", "e", "l", "o", "ab", "日", "▁▁", ",", "\u00e9"]
    vocab = {"<s>": 0, "</s>": 1}
    vocab |= {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    vocab |= {piece: 258 + index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token=None))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def detokenizer(tokenizer: Tokenizer) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(TokenBytes(tokenizer, SPECIAL_IDS))


def decode_in_parts(tokenizer: Tokenizer, token_ids: list[int], size: int = 1) -> list[str]:
    parts = detokenizer(tokenizer)
    pushed = [parts.push(token_ids[start : start + size]) for start in range(0, len(token_ids), size)]
    return [*pushed, parts.flush()]


@given(token_ids=st.lists(st.integers(0, 330), max_size=60), size=st.integers(1, 7))
def test_parts_of_a_byte_level_sequence_add_up_to_the_tokenizers_own_decode(token_ids: list[int], size: int) -> None:
    tokenizer = byte_level()

    parts = decode_in_parts(tokenizer, token_ids, size)

    assert "".join(parts) == tokenizer.decode(token_ids, skip_special_tokens=True)


@given(
    text=st.text(alphabet=st.characters(codec="utf-8", exclude_characters="▁"), max_size=30),
    pieces=st.lists(st.sampled_from([0, 1, 258, 259, 260, 261, 265, 266, 267, 268, 269])),
)
def test_parts_of_a_byte_fallback_sequence_add_up_to_the_tokenizers_own_decode(text: str, pieces: list[int]) -> None:
    tokenizer = byte_fallback()
    token_ids = [token_id for piece in pieces for token_id in (piece, *(2 + byte for byte in text.encode()))]

    parts = decode_in_parts(tokenizer, token_ids)

    assert "".join(parts) == tokenizer.decode(token_ids, skip_special_tokens=True)


@given(token_ids=st.lists(st.integers(0, 275), max_size=60), size=st.integers(2, 9))
def test_text_of_any_byte_fallback_sequence_does_not_depend_on_the_split(token_ids: list[int], size: int) -> None:
    tokenizer = byte_fallback()

    assert "".join(decode_in_parts(tokenizer, token_ids, 1)) == "".join(decode_in_parts(tokenizer, token_ids, size))


@given(text=st.text(max_size=40))
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_no_part_of_a_valid_text_has_half_a_code_point(
    make: "functools._lru_cache_wrapper[Tokenizer]", text: str
) -> None:
    tokenizer = make()
    vocabulary = tokenizer.get_vocab()
    token_ids = [vocabulary[token] for token in _byte_tokens(tokenizer, text)]

    parts = decode_in_parts(tokenizer, token_ids)

    assert "".join(parts) == tokenizer.decode(token_ids)
    assert parts[-1] == ""
    assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


def _byte_tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    if tokenizer is byte_fallback():
        return [f"<0x{byte:02X}>" for byte in text.encode()]
    return [token for character in text for token in _byte_level_tokens(character)]


def _byte_level_tokens(character: str) -> list[str]:
    step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [letter for piece, _ in step.pre_tokenize_str(character) for letter in piece]


def test_an_unfinished_code_point_at_the_end_is_one_replacement_character() -> None:
    parts = detokenizer(byte_fallback())

    shown = parts.push([2 + byte for byte in b"ok\xf0\x9f\x98"])

    assert (shown, parts.flush()) == ("ok", "\ufffd")


def test_control_tokens_are_not_text_even_inside_a_code_point() -> None:
    first, second = (2 + byte for byte in "é".encode())

    parts = decode_in_parts(byte_fallback(), [0, first, 1, second, 1])

    assert "".join(parts) == "é"


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    assert decode_in_parts(byte_level(), [50_000, 50_001]) == ["", "", ""]


def test_a_push_costs_the_same_at_the_end_of_a_long_invalid_sequence() -> None:
    # 200,000 stray continuation bytes: a detokenizer that decodes its backlog again would need minutes.
    parts = detokenizer(byte_fallback())
    parts.push([258])
    started = time.process_time()

    shown = sum(len(parts.push([2 + 0x80])) for _ in range(200_000))

    assert shown == 200_000
    assert time.process_time() - started < 5


def test_what_continues_a_text_keeps_the_space_that_the_start_of_one_loses() -> None:
    tokenizer = byte_fallback()
    hello, world = (tokenizer.get_vocab()[piece] for piece in ("▁hello", "▁world"))
    token_bytes = TokenBytes(tokenizer, SPECIAL_IDS)

    assert IncrementalDetokenizer(token_bytes).push([world]) == "world"
    assert IncrementalDetokenizer(token_bytes, hello).push([world]) == " world"
    assert IncrementalDetokenizer(token_bytes, 0).push([world]) == "world"
