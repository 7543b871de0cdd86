"""Token events to pieces of text, with a tokenizer whose tokens are words."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deployments.streaming import TextPiece, TextStream
from engine.tokenizer import Tokenizer
from messages.requests import RequestId
from messages.tokens import FinishReason, TokenEvent

WORDS = ["<end>", "one", "two", "three", "four", "."]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("words")
    backend = Backend(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="."))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.Sequence([decoders.Fuse()])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(folder)
    return Tokenizer.load(folder)


def event(*token_ids: int, at: int = 0, finish: FinishReason | None = None) -> TokenEvent:
    return TokenEvent(request_id=RequestId("r"), first_index=at, token_ids=token_ids, finish_reason=finish)


def test_text_comes_as_tokens_come_and_the_end_token_is_not_shown(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ())

    pieces = [
        stream.push(event(1)),
        stream.push(event(2, 3, at=1)),
        stream.push(event(0, at=3, finish=FinishReason.STOP)),
    ]

    assert "".join(piece.text for piece in pieces) == "onetwothree"
    assert [piece.finish_reason for piece in pieces] == [None, None, FinishReason.STOP]
    assert stream.num_tokens == 4


def test_a_stop_string_ends_inside_an_event_and_hides_what_follows(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ("wothr",))

    first = stream.push(event(1, 2))
    last = stream.push(event(3, 4, at=2))

    assert first == TextPiece(text="onet", token_ids=(1, 2))
    assert last == TextPiece(text="", token_ids=(3,), finish_reason=FinishReason.STOP, stop="wothr")
    assert stream.num_tokens == 3


def test_text_held_back_for_a_stop_that_never_comes_is_given_at_the_end(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ("threefive",))

    pieces = [stream.push(event(3)), stream.push(event(4, at=1, finish=FinishReason.LENGTH))]

    assert [piece.text for piece in pieces] == ["", "threefour"]
    assert pieces[-1].finish_reason is FinishReason.LENGTH


def test_a_stop_in_the_last_event_goes_before_the_length(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ("two",))

    piece = stream.push(event(1, 2, finish=FinishReason.LENGTH))

    assert (piece.text, piece.finish_reason, piece.stop) == ("one", FinishReason.STOP, "two")
