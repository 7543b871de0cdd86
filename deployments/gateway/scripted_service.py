"""A GenerationService that answers from a script: what the doors are tried with when no model is at hand.

It keeps the whole promise of the protocol (limits, stops, choices, log probabilities, one finish per choice and one
summary, deadline, nothing left after a close); only the text is not generated, so what chooses among tokens has
nothing to choose. One piece of the script is one token, whose id is the piece's index, and the end of the script is an
end token of the model; one character of a prompt's text is one prompt token.
"""

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace

from deployments.gateway.sampling import check_ids
from deployments.gateway.scripted_placement import explain_scripted
from deployments.service import (
    ChatTurn,
    Chunk,
    Explanation,
    Finish,
    GenerationSpec,
    ModelCard,
    ScoredToken,
    Summary,
)
from engine.stop_strings import StopMatcher
from messages.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, ServingError
from messages.tokens import FinishReason, Provenance, Usage

_LONGEST_SLEEP_S = 3600.0
_LOGPROB = -0.25
"""Of every token; the one after it has twice as much, and so on."""

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


class _Choice:
    """One text of an answer."""

    def __init__(self, index: int, spec: GenerationSpec, pieces: Sequence[str]) -> None:
        self.num_tokens = 0
        self.is_done = False
        self._index = index
        self._spec = spec
        self._pieces = pieces
        self._matcher = StopMatcher(spec.stop)
        self._unsaid = _prompt_text(spec) if spec.echo else ""

    def add(self, request_id: str, *, is_last: bool) -> Chunk:
        """Make the next token's chunk, with the finish when a stop, the limit or the script's end is reached."""
        spec, token_id = self._spec, self.num_tokens % len(self._pieces)
        self.num_tokens += 1
        can_stop = self.num_tokens > spec.min_tokens
        is_stop_token = can_stop and token_id in spec.stop_token_ids
        piece = "" if is_stop_token and not spec.include_stop else self._pieces[token_id]
        text, stop = self._matcher.push(piece, can_stop=can_stop)
        finish: Finish | None
        if stop is not None:
            finish = Finish(reason=FinishReason.STOP, stop=stop)
            text += stop if spec.include_stop else ""
        else:
            finish = self._finish(token_id if is_stop_token else None, is_last=is_last and can_stop)
            text += "" if finish is None else self._matcher.flush()
        self.is_done = finish is not None
        before, self._unsaid = self._unsaid, ""
        return Chunk(
            request_id=request_id,
            choice=self._index,
            text=before + text,
            token_ids=(token_id,),
            logprobs=() if spec.logprobs is None else (self._scored(token_id, spec.logprobs),),
            finish=finish,
        )

    def _finish(self, stop_token_id: int | None, *, is_last: bool) -> Finish | None:
        if stop_token_id is not None:
            return Finish(reason=FinishReason.STOP, stop=stop_token_id)
        if self.num_tokens == self._spec.max_tokens:
            return Finish(reason=FinishReason.LENGTH)
        return Finish(reason=FinishReason.STOP) if is_last and not self._spec.ignore_eos else None

    def _scored(self, token_id: int, num_top: int) -> ScoredToken:
        ids = [(token_id + rank) % len(self._pieces) for rank in range(min(num_top, len(self._pieces)))]
        top = tuple(_token(other, self._pieces[other], rank + 1) for rank, other in enumerate(ids))
        return replace(_token(token_id, self._pieces[token_id], 1), top=top)


@dataclass(slots=True, kw_only=True)
class _Answer:
    """One request that runs."""

    spec: GenerationSpec
    request_id: str
    prompt_tokens: int
    started_s: float
    choices: Sequence[_Choice]
    first_token_s: float = 0.0

    async def pause(self, duration_s: float) -> None:
        """Wait, but not past the request's deadline."""
        timeout_s = self.spec.timeout_s
        left_s = math.inf if timeout_s is None else self.started_s + timeout_s - time.monotonic()
        await asyncio.sleep(max(0.0, min(duration_s, left_s, _LONGEST_SLEEP_S)))
        if duration_s >= left_s:
            raise DeadlineExceeded(f"the request took longer than {timeout_s} s", timeout_s=timeout_s)

    def step(self, *, is_last: bool) -> Iterator[Chunk]:
        """One token of every choice that still runs; the last of them has the summary."""
        if self.first_token_s == 0.0:
            self.first_token_s = time.monotonic() - self.started_s
            if self.spec.prompt_logprobs is not None:
                scored = (None, *(_token(*part, 1) for part in _prompt_parts(self.spec)[1:]))
                yield Chunk(request_id=self.request_id, text="", token_ids=(), prompt_logprobs=scored)
        for choice in self.choices:
            if choice.is_done:
                continue
            chunk = choice.add(self.request_id, is_last=is_last)
            yield replace(chunk, summary=self._summary()) if self.is_done else chunk

    @property
    def is_done(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.is_done for choice in self.choices)

    def _summary(self) -> Summary:
        num_tokens = sum(choice.num_tokens for choice in self.choices)
        return Summary(
            usage=Usage(prompt_tokens=self.prompt_tokens, completion_tokens=num_tokens, cached_tokens=0),
            provenance=Provenance(prefill_worker="scripted", decode_worker="scripted"),
            first_token_s=self.first_token_s,
            total_s=time.monotonic() - self.started_s,
        )


class ScriptedService:
    """Answers every request with the same script, and counts those that run."""

    def __init__(
        self,
        script: Script,
        *,
        models: Sequence[ModelCard] = DEFAULT_MODELS,
        is_ready: bool = True,
        vocab_size: int = 1000,
    ) -> None:
        self.script = script
        self.ready = is_ready
        self.specs: list[GenerationSpec] = []
        """Every request so far."""
        self.explained: list[GenerationSpec] = []
        """Every request that was only asked about."""
        self.num_running = 0
        """Requests whose iterator is neither at its end nor closed, and explanations under way."""
        self._models = list(models)
        self._vocab_size = vocab_size
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
            answer = self._answer(spec)
            has_end = self.script.error is None and not self.script.hang and bool(self.script.pieces)
            num_pieces = len(self.script.pieces)
            # A request that may not end with the script gets it again and again.
            for position in itertools.count(1) if has_end else range(1, num_pieces + 1):
                await answer.pause(self.script.delay_s)
                for chunk in answer.step(is_last=has_end and position >= num_pieces):
                    yield chunk
                if answer.is_done:
                    return
            await answer.pause(math.inf if self.script.hang else 0.0)
            raise self.script.error or ServingError("the script has no pieces")
        finally:
            self.num_running -= 1

    async def explain(self, spec: GenerationSpec) -> Explanation:
        """Place a request among scripted workers, after one delay; the script's error and its hanging are kept."""
        self.explained.append(spec)
        self.num_running += 1
        try:
            answer = self._answer(spec)
            await answer.pause(math.inf if self.script.hang else self.script.delay_s)
            if self.script.error is not None:
                raise self.script.error
            return Explanation(prompt_tokens=answer.prompt_tokens, placement=explain_scripted(answer.prompt_tokens))
        finally:
            self.num_running -= 1

    def _answer(self, spec: GenerationSpec) -> _Answer:
        """Begin a request that can run."""
        prompt_tokens, room = self._check(spec)
        limited = replace(spec, max_tokens=spec.max_tokens or room)
        return _Answer(
            prompt_tokens=prompt_tokens,
            spec=limited,
            request_id=f"scripted-{next(self._numbers)}",
            started_s=time.monotonic(),
            choices=[_Choice(index, limited, self.script.pieces) for index in range(spec.n)],
        )

    def _check(self, spec: GenerationSpec) -> tuple[int, int]:
        """Return the number of prompt tokens of a request that can run, and of tokens that fit behind them."""
        card = next((card for card in self._models if spec.model in (None, card.name)), None)
        if card is None:
            raise ModelNotFound(f"the model {spec.model!r} is not served here", param="model")
        if spec.max_tokens is not None and spec.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
        check_ids((part for part in spec.prompt if isinstance(part, int)), self._vocab_size, "prompt")
        check_ids((token_id for token_id, _ in spec.logit_bias), self._vocab_size, "logit_bias")
        check_ids(spec.allowed_token_ids or (), self._vocab_size, "allowed_token_ids")
        check_ids(spec.stop_token_ids, self._vocab_size, "stop_token_ids")
        num_tokens = sum(len(part.content) if isinstance(part, ChatTurn) else 1 for part in spec.prompt)
        if num_tokens == 0:
            raise InvalidRequest("prompt must not be empty", param="prompt")
        if num_tokens + (spec.max_tokens or 1) > card.context_length:
            message = (
                f"max_tokens is {spec.max_tokens or 1}, but the context of {card.context_length} holds "
                f"{card.context_length - num_tokens} after a prompt of {num_tokens} tokens"
            )
            raise InvalidRequest(message, param="max_tokens")
        return num_tokens, card.context_length - num_tokens


def _prompt_parts(spec: GenerationSpec) -> list[tuple[int, str]]:
    """Id and text of every prompt token."""
    if isinstance(spec.prompt, str):
        return [(ord(character), character) for character in spec.prompt]
    return [
        pair
        for part in spec.prompt
        for pair in ([(part, f"<{part}>")] if isinstance(part, int) else [(ord(c), c) for c in part.content])
    ]


def _prompt_text(spec: GenerationSpec) -> str:
    return "".join(text for _, text in _prompt_parts(spec))


def _token(token_id: int, text: str, rank: int) -> ScoredToken:
    return ScoredToken(token_id=token_id, text=text, data=text.encode(), logprob=_LOGPROB * rank)
