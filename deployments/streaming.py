"""From token events to chunks of text: detokenize, match stop strings, end every choice exactly once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deployments.service import ChatTurn, Chunk, Finish, GenerationSpec, ScoredToken
from engine.stop_strings import StopMatcher
from engine.tokenizer import Tokenizer
from messages.requests import GenerationRequest
from messages.tokens import FinishReason, TokenEvent, TokenLogprob

MAX_PROMPT_LOGPROBS = 512
"""Prompt tokens per chunk: a long prompt's log probabilities are a large message and a long pause of the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """When a client wants the text to end, and how much of the end to show."""

    strings: tuple[str, ...] = ()
    min_tokens: int = 0
    """The first `min_tokens` tokens complete no stop string."""
    include: bool = False
    """Show the stop string, or the text of the client's stop token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPiece:
    """What one token event gives the client."""

    text: str
    token_ids: tuple[int, ...]
    finish: Finish | None = None


class TextStream:
    """One choice's text; nothing follows the piece that has a finish."""

    def __init__(self, tokenizer: Tokenizer, rules: StopRules, after: int | None = None) -> None:
        self._detokenizer = tokenizer.make_detokenizer(after)
        self._rules = rules
        self._stops = StopMatcher(rules.strings)
        self.num_tokens = 0
        self.is_done = False

    def push(self, event: TokenEvent) -> TextPiece:
        """Take in one event, token by token, so that a stop string ends inside the event it completes in."""
        text = ""
        num_shown = len(event.token_ids) - self._hides_last(event)
        for count, token_id in enumerate(event.token_ids, start=1):
            self.num_tokens += 1
            emitted, stop = self._match(self._detokenizer.push((token_id,)) if count <= num_shown else "")
            text += emitted
            if stop is not None:
                return self._end(text, event.token_ids[:count], Finish(reason=FinishReason.STOP, stop=stop))
        if event.finish_reason is None:
            return TextPiece(text=text, token_ids=event.token_ids)
        emitted, stop = self._match(self._detokenizer.flush())
        text += emitted
        if stop is not None:
            return self._end(text, event.token_ids, Finish(reason=FinishReason.STOP, stop=stop))
        finish = Finish(reason=event.finish_reason, stop=event.stop_token_id)
        return self._end(text + self._stops.flush(), event.token_ids, finish)

    def _hides_last(self, event: TokenEvent) -> bool:
        """Whether the last token ended the choice and is not to be seen."""
        if event.finish_reason is not FinishReason.STOP:
            return False
        return event.stop_token_id is None or not self._rules.include

    def _match(self, text: str) -> tuple[str, str | None]:
        shown, stop = self._stops.push(text, can_stop=self.num_tokens > self._rules.min_tokens)
        return (shown + stop if stop is not None and self._rules.include else shown), stop

    def _end(self, text: str, token_ids: tuple[int, ...], finish: Finish) -> TextPiece:
        self.is_done = True
        return TextPiece(text=text, token_ids=token_ids, finish=finish)


class TextAnswer:
    """All choices of one request."""

    def __init__(self, request: GenerationRequest, spec: GenerationSpec, tokenizer: Tokenizer) -> None:
        rules = StopRules(strings=spec.stop, min_tokens=spec.min_tokens, include=spec.include_stop)
        # A chat's answer is a text of its own, a prompt's goes on with it.
        is_chat = any(isinstance(part, ChatTurn) for part in spec.prompt)
        after = None if is_chat else request.prompt_token_ids[-1]
        self._request_id = request.request_id
        self._tokenizer = tokenizer
        self._streams = [TextStream(tokenizer, rules, after) for _ in range(spec.n)]
        self._unsaid = [_prompt_text(request, spec, tokenizer) if spec.echo else ""] * spec.n

    @property
    def is_done(self) -> bool:
        """Whether every choice has ended."""
        return all(stream.is_done for stream in self._streams)

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(stream.num_tokens for stream in self._streams)

    def take(self, event: TokenEvent) -> Iterator[Chunk]:
        """The chunks of one event; none for a choice that has ended, which a stop string does before workers know."""
        stream = self._streams[event.choice]
        if stream.is_done:
            return
        for start in range(0, len(event.prompt_logprobs), MAX_PROMPT_LOGPROBS):
            part = event.prompt_logprobs[start : start + MAX_PROMPT_LOGPROBS]
            scored = tuple(None if entry is None else score(self._tokenizer, entry) for entry in part)
            yield Chunk(request_id=self._request_id, text="", token_ids=(), choice=event.choice, prompt_logprobs=scored)
        piece = stream.push(event)
        before, self._unsaid[event.choice] = self._unsaid[event.choice], ""
        yield Chunk(
            request_id=self._request_id,
            choice=event.choice,
            text=before + piece.text,
            token_ids=piece.token_ids,
            logprobs=self._scored(event.logprobs[: len(piece.token_ids)]),
            finish=piece.finish,
        )

    def _scored(self, entries: Sequence[TokenLogprob]) -> tuple[ScoredToken, ...]:
        return tuple(score(self._tokenizer, entry) for entry in entries)


def _prompt_text(request: GenerationRequest, spec: GenerationSpec, tokenizer: Tokenizer) -> str:
    return spec.prompt if isinstance(spec.prompt, str) else tokenizer.decode(request.prompt_token_ids)


def score(tokenizer: Tokenizer, entry: TokenLogprob) -> ScoredToken:
    """A log probability with the text of its tokens."""
    top = tuple(_scored_token(tokenizer, token_id, logprob) for token_id, logprob in entry.top)
    return _scored_token(tokenizer, entry.token_id, entry.logprob, top)


def _scored_token(
    tokenizer: Tokenizer, token_id: int, logprob: float, top: tuple[ScoredToken, ...] = ()
) -> ScoredToken:
    data = tokenizer.token_bytes(token_id)
    return ScoredToken(token_id=token_id, text=data.decode(errors="replace"), data=data, logprob=logprob, top=top)
