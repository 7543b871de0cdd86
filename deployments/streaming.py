"""From token events to chunks of text: detokenize, match stop strings, coalesce only what is already waiting."""

from dataclasses import dataclass

from engine.stop_strings import StopMatcher
from engine.tokenizer import Tokenizer
from messages.tokens import FinishReason, TokenEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPiece:
    """What one token event gives the client."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop: str | None = None
    """The stop string that ended the text, if one did."""


class TextStream:
    """One choice's text; nothing follows the piece that has a finish reason."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._detokenizer = tokenizer.make_detokenizer()
        self._stops = StopMatcher(stop)
        self.num_tokens = 0

    def push(self, event: TokenEvent) -> TextPiece:
        """Take in one event, token by token, so that a stop string ends inside the event it completes in."""
        text = ""
        for count, token_id in enumerate(event.token_ids, start=1):
            self.num_tokens += 1
            emitted, stop = self._stops.push(self._detokenizer.push((token_id,)))
            text += emitted
            if stop is not None:
                return TextPiece(
                    text=text, token_ids=event.token_ids[:count], finish_reason=FinishReason.STOP, stop=stop
                )
        if event.finish_reason is None:
            return TextPiece(text=text, token_ids=event.token_ids)
        emitted, stop = self._stops.push(self._detokenizer.flush())
        text += emitted
        if stop is None:
            text += self._stops.flush()
        reason = event.finish_reason if stop is None else FinishReason.STOP
        return TextPiece(text=text, token_ids=event.token_ids, finish_reason=reason, stop=stop)
