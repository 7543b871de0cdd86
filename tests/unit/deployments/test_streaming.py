"""Token events to pieces of text, with a tokenizer whose tokens are words."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deployments.service import Chunk, Finish, GenerationSpec
from deployments.streaming import MAX_PROMPT_LOGPROBS, StopRules, TextAnswer, TextPiece, TextStream
from engine.tokenizer import Tokenizer
from messages.requests import GenerationRequest, RequestId, SamplingParams
from messages.tokens import FinishReason, TokenEvent, TokenLogprob

WORDS = ["<end>", "one", "two", "three", "four", "."]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("words")
    backend = Backend(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="."))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.Sequence([decoders.Fuse()])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(folder)
    return Tokenizer.load(folder)


def event(*token_ids: int, at: int = 0, finish: FinishReason | None = None, **fields: Any) -> TokenEvent:
    return TokenEvent(request_id=RequestId("r"), first_index=at, token_ids=token_ids, finish_reason=finish, **fields)


def test_text_comes_as_tokens_come_and_the_end_token_is_not_shown(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, StopRules())

    pieces = [
        stream.push(event(1)),
        stream.push(event(2, 3, at=1)),
        stream.push(event(0, at=3, finish=FinishReason.STOP)),
    ]

    assert "".join(piece.text for piece in pieces) == "onetwothree"
    assert [piece.finish for piece in pieces] == [None, None, Finish(reason=FinishReason.STOP)]
    assert stream.num_tokens == 4


def test_a_stop_string_ends_inside_an_event_and_hides_what_follows(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, StopRules(strings=("wothr",)))

    first = stream.push(event(1, 2))
    last = stream.push(event(3, 4, at=2))

    assert first == TextPiece(text="onet", token_ids=(1, 2))
    assert last == TextPiece(text="", token_ids=(3,), finish=Finish(reason=FinishReason.STOP, stop="wothr"))
    assert stream.num_tokens == 3


def test_text_held_back_for_a_stop_that_never_comes_is_given_at_the_end(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, StopRules(strings=("threefive",)))

    pieces = [stream.push(event(3)), stream.push(event(4, at=1, finish=FinishReason.LENGTH))]

    assert [piece.text for piece in pieces] == ["", "threefour"]
    assert pieces[-1].finish == Finish(reason=FinishReason.LENGTH)


def test_a_stop_in_the_last_event_goes_before_the_length(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, StopRules(strings=("two",)))

    piece = stream.push(event(1, 2, finish=FinishReason.LENGTH))

    assert (piece.text, piece.finish) == ("one", Finish(reason=FinishReason.STOP, stop="two"))


STOP = FinishReason.STOP


@pytest.mark.parametrize(
    ("include", "texts"),
    [(False, ["onet", ""]), (True, ["onet", "wothr"])],
)
def test_a_stop_string_stays_in_the_text_when_it_is_wanted(
    tokenizer: Tokenizer, texts: list[str], *, include: bool
) -> None:
    stream = TextStream(tokenizer, StopRules(strings=("wothr",), include=include))

    assert [stream.push(event(1, 2)).text, stream.push(event(3, 4, at=2)).text] == texts


@pytest.mark.parametrize(("include", "text"), [(False, "one"), (True, "onetwo")])
def test_a_stop_token_is_text_only_when_it_is_wanted_and_is_named(
    tokenizer: Tokenizer, text: str, *, include: bool
) -> None:
    stream = TextStream(tokenizer, StopRules(include=include))

    piece = stream.push(event(1, 2, finish=STOP, stop_token_id=2))

    assert piece == TextPiece(text=text, token_ids=(1, 2), finish=Finish(reason=STOP, stop=2))


def test_an_end_token_that_is_no_control_token_is_no_text_either(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, StopRules(include=True))

    assert stream.push(event(1, 5, finish=STOP)) == TextPiece(
        text="one", token_ids=(1, 5), finish=Finish(reason=STOP, stop=None)
    )


def test_a_step_of_many_tokens_ends_at_the_stop_or_at_the_cap(tokenizer: Tokenizer) -> None:
    stopped = TextStream(tokenizer, StopRules()).push(event(1, 2, 0, finish=STOP))
    capped = TextStream(tokenizer, StopRules()).push(event(1, 2, finish=FinishReason.LENGTH))

    assert (stopped.text, stopped.token_ids, stopped.finish) == ("onetwo", (1, 2, 0), Finish(reason=STOP))
    assert (capped.text, capped.token_ids, capped.finish) == ("onetwo", (1, 2), Finish(reason=FinishReason.LENGTH))


def test_the_first_min_tokens_tokens_complete_no_stop_string(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, StopRules(strings=("two", "three"), min_tokens=2))

    piece = stream.push(event(1, 2, 3))

    assert (piece.text, piece.finish) == ("onetwo", Finish(reason=STOP, stop="three"))


def test_a_stop_string_that_begins_in_the_first_min_tokens_tokens_still_ends_the_text(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, StopRules(strings=("twoth",), min_tokens=2))

    assert stream.push(event(1, 2, 3)).text == "one"


def answer(tokenizer: Tokenizer, **fields: Any) -> TextAnswer:
    request = GenerationRequest(
        request_id=RequestId("r"), model="m", prompt_token_ids=(4,), sampling=SamplingParams(max_tokens=9)
    )
    given: dict[str, Any] = {"prompt": (4,)} | fields
    return TextAnswer(request, GenerationSpec(**given), tokenizer)


def take(answer: TextAnswer, *events: TokenEvent) -> list[Chunk]:
    return [chunk for event in events for chunk in answer.take(event)]


def test_what_follows_a_choices_stop_string_is_dropped_while_the_others_go_on(tokenizer: Tokenizer) -> None:
    both = answer(tokenizer, n=2, stop=("two",))

    chunks = take(both, event(1, 2), event(1, choice=1), event(3, at=2), event(3, at=1, choice=1))
    assert [(chunk.choice, chunk.text) for chunk in chunks] == [(0, "one"), (1, "one"), (1, "three")]
    was_done = both.is_done
    chunks += take(both, event(4, at=3, finish=STOP), event(0, at=2, choice=1, finish=STOP))
    assert [chunk.choice for chunk in chunks if chunk.finish is not None] == [0, 1]
    assert (was_done, both.is_done) == (False, True)
    assert both.num_tokens == 2 + 3


def test_log_probabilities_go_with_their_tokens_and_end_with_them(tokenizer: Tokenizer) -> None:
    logprobs = tuple(TokenLogprob(token_id=i, logprob=-float(i), top=((1, -1.0), (i, -2.0))) for i in (1, 2, 3))

    (chunk,) = take(answer(tokenizer, stop=("two",), logprobs=2), event(1, 2, 3, logprobs=logprobs))

    assert chunk.token_ids == (1, 2)
    assert [(token.text, token.data, token.logprob) for token in chunk.logprobs] == [
        ("one", b"one", -1.0),
        ("two", b"two", -2.0),
    ]
    assert [(token.text, token.logprob) for token in chunk.logprobs[1].top] == [("one", -1.0), ("two", -2.0)]


def test_a_long_prompts_log_probabilities_come_in_parts_before_the_text(tokenizer: Tokenizer) -> None:
    scored = (None, *(TokenLogprob(token_id=1, logprob=-0.5) for _ in range(MAX_PROMPT_LOGPROBS)))

    first, second, text = take(answer(tokenizer), event(1, prompt_logprobs=scored))

    assert (len(first.prompt_logprobs), len(second.prompt_logprobs)) == (MAX_PROMPT_LOGPROBS, 1)
    assert first.prompt_logprobs[0] is None
    assert (text.text, text.prompt_logprobs) == ("one", ())


def test_the_prompt_comes_once_before_each_choice(tokenizer: Tokenizer) -> None:
    chunks = take(answer(tokenizer, prompt="say ", echo=True, n=2), event(1), event(1, choice=1), event(2, at=1))

    assert [chunk.text for chunk in chunks] == ["say one", "say one", "two"]
    assert [chunk.token_ids for chunk in chunks] == [(1,), (1,), (2,)]
