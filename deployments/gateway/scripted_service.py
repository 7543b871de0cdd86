"""A GenerationService that answers from a script: what the doors are tried with when no model is at hand.

It keeps the whole promise of the protocol (limits, stops, one finish, deadline, nothing left after a close); only
the text is not generated. One piece of the script is one token, whose id is the piece's index; one character of a
prompt's text is one prompt token.
"""

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from deployments.service import ChatTurn, Chunk, Finish, GenerationSpec, ModelCard
from engine.stop_strings import StopMatcher
from messages.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, ServingError
from messages.tokens import FinishReason, Provenance, Usage

_LONGEST_SLEEP_S = 3600.0

DEFAULT_MODELS = (ModelCard(name="scripted", context_length=4096),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What every request is answered with."""

    pieces: Sequence[str]
    """Text of each token."""
    delay_s: float = 0.0
    """Pause before each piece."""
    error: BaseException | None = None
    """Raised instead of the finish, after the pieces."""
    hang: bool = False
    """Never finish: after the pieces, wait until the request is closed."""


@dataclass(slots=True)
class _Answer:
    """One request that runs."""

    spec: GenerationSpec
    request_id: str
    prompt_tokens: int
    started_s: float
    matcher: StopMatcher
    num_tokens: int = 0
    first_token_s: float = field(default=0.0)

    async def pause(self, duration_s: float) -> None:
        """Wait, but not past the request's deadline."""
        timeout_s = self.spec.timeout_s
        left_s = math.inf if timeout_s is None else self.started_s + timeout_s - time.monotonic()
        await asyncio.sleep(max(0.0, min(duration_s, left_s, _LONGEST_SLEEP_S)))
        if duration_s >= left_s:
            raise DeadlineExceeded(f"the request took longer than {timeout_s} s", timeout_s=timeout_s)

    def add(self, piece: str, *, is_last: bool) -> Chunk:
        """Count one token and make its chunk, with the finish when a stop, the limit or the script's end is reached."""
        if self.num_tokens == 0:
            self.first_token_s = time.monotonic() - self.started_s
        self.num_tokens += 1
        text, stop = self.matcher.push(piece)
        chunk = Chunk(request_id=self.request_id, text=text, token_ids=(self.num_tokens - 1,))
        if stop is not None:
            return replace(chunk, finish=self._finish(FinishReason.STOP, stop))
        if self.num_tokens == self.spec.max_tokens:
            return replace(chunk, text=text + self.matcher.flush(), finish=self._finish(FinishReason.LENGTH, None))
        if is_last:
            return replace(chunk, text=text + self.matcher.flush(), finish=self._finish(FinishReason.STOP, None))
        return chunk

    def _finish(self, reason: FinishReason, stop: str | None) -> Finish:
        return Finish(
            reason=reason,
            stop=stop,
            usage=Usage(prompt_tokens=self.prompt_tokens, completion_tokens=self.num_tokens, cached_tokens=0),
            provenance=Provenance(prefill_worker="scripted", decode_worker="scripted"),
            first_token_s=self.first_token_s,
            total_s=time.monotonic() - self.started_s,
        )


class ScriptedService:
    """Answers every request with the same script, and counts those that run."""

    def __init__(self, script: Script, *, models: Sequence[ModelCard] = DEFAULT_MODELS, is_ready: bool = True) -> None:
        self.script = script
        self.ready = is_ready
        self.specs: list[GenerationSpec] = []
        """Every request so far."""
        self.num_running = 0
        """Requests whose iterator is neither at its end nor closed."""
        self._models = list(models)
        self._numbers = itertools.count(1)

    def models(self) -> list[ModelCard]:
        """Models that can be asked for."""
        return list(self._models)

    def is_ready(self) -> bool:
        """Whether `ready` is set."""
        return self.ready

    async def generate(self, spec: GenerationSpec) -> AsyncIterator[Chunk]:
        """Run one request; see GenerationService."""
        self.specs.append(spec)
        self.num_running += 1
        try:
            answer = _Answer(
                spec=spec,
                request_id=f"scripted-{next(self._numbers)}",
                prompt_tokens=self._check(spec),
                started_s=time.monotonic(),
                matcher=StopMatcher(spec.stop),
            )
            ends_here = self.script.error is None and not self.script.hang
            for index, piece in enumerate(self.script.pieces, start=1):
                await answer.pause(self.script.delay_s)
                chunk = answer.add(piece, is_last=ends_here and index == len(self.script.pieces))
                yield chunk
                if chunk.finish is not None:
                    return
            await answer.pause(math.inf if self.script.hang else 0.0)
            raise self.script.error or ServingError("the script has no pieces")
        finally:
            self.num_running -= 1

    def _check(self, spec: GenerationSpec) -> int:
        """Return the number of prompt tokens of a request that can run."""
        card = next((card for card in self._models if spec.model in (None, card.name)), None)
        if card is None:
            raise ModelNotFound(f"the model {spec.model!r} is not served here", param="model")
        if spec.max_tokens is not None and spec.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
        # A str has one part per character.
        num_tokens = sum(len(part.content) if isinstance(part, ChatTurn) else 1 for part in spec.prompt)
        if num_tokens == 0:
            raise InvalidRequest("prompt must not be empty", param="prompt")
        if num_tokens + (spec.max_tokens or 1) > card.context_length:
            message = f"{num_tokens} prompt tokens and {spec.max_tokens or 1} more do not fit {card.context_length}"
            raise InvalidRequest(message, param="max_tokens")
        return num_tokens
