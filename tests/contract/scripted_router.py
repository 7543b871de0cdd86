"""A router that answers from a list of token ids as workers would, and a tokenizer whose tokens are words."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from cluster.explanation import PlacementExplanation
from deployments.config import LimitsConfig
from deployments.gateway.scripted_placement import explain_scripted
from deployments.gateway.text_service import TextService
from engine.tokenizer import Tokenizer
from messages.requests import GenerationRequest
from messages.tokens import FinishReason, Provenance, TokenEvent, TokenLogprob
from telemetry.metrics import GatewayMetrics, WorkerSample

WORDS = ("<end>", "once", "upon", "a", "time", "there", "was", "?")
END, ONCE, UPON, A, TIME, THERE, WAS, UNKNOWN = range(len(WORDS))
ADDED = len(WORDS)
"""An added token; the vocabulary's highest id."""
_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def make_tokenizer(folder: Path) -> Tokenizer:
    backend = Backend(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.Sequence([decoders.Fuse()])
    backend.add_tokens([AddedToken("<think>")])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    wrapped.chat_template = _TEMPLATE
    wrapped.save_pretrained(folder)
    return Tokenizer.load(folder)


class ScriptedRouter:
    """Gives every choice the same token ids, again and again until something ends it."""

    def __init__(self, token_ids: Sequence[int], *, context_length: int = 4096, delay_s: float = 0.0) -> None:
        self.token_ids = token_ids
        self.requests: list[GenerationRequest] = []
        self.explained: list[GenerationRequest] = []
        self.num_running = 0
        self._context_length = context_length
        self._delay_s = delay_s

    def is_ready(self) -> bool:
        return True

    def context_length(self) -> int | None:
        return self._context_length

    def capacity_tokens(self) -> int:
        return 1_000_000

    async def route(self, request: GenerationRequest) -> "ScriptedRoute":
        self.requests.append(request)
        return ScriptedRoute(self, request, self._delay_s)

    async def explain(self, request: GenerationRequest) -> PlacementExplanation:
        self.explained.append(request)
        await asyncio.sleep(self._delay_s)
        return explain_scripted(len(request.prompt_token_ids))


class ScriptedRoute:
    def __init__(self, router: ScriptedRouter, request: GenerationRequest, delay_s: float) -> None:
        self.cached_tokens = 0
        self.provenance = Provenance(decode_worker="scripted")
        self._router = router
        self._request = request
        self._delay_s = delay_s

    async def tokens(self) -> AsyncGenerator[TokenEvent, None]:
        self._router.num_running += 1
        try:
            live, index = list(range(self._request.sampling.n)), 0
            while live:
                await asyncio.sleep(self._delay_s)
                events = [self._event(choice, index) for choice in live]
                for event in events:
                    yield event
                live = [event.choice for event in events if event.finish_reason is None]
                index += 1
        finally:
            self._router.num_running -= 1

    def _event(self, choice: int, index: int) -> TokenEvent:
        sampling = self._request.sampling
        banned = {*sampling.end_token_ids, *sampling.stop_token_ids} if index < sampling.min_tokens else set()
        allowed = [token_id for token_id in self._router.token_ids if token_id not in banned]
        token_id = allowed[index % len(allowed)]
        stop = token_id if token_id in sampling.stop_token_ids else None
        reason = None
        if stop is not None or token_id in sampling.end_token_ids:
            reason = FinishReason.STOP
        elif index + 1 == sampling.max_tokens:
            reason = FinishReason.LENGTH
        return TokenEvent(
            request_id=self._request.request_id,
            choice=choice,
            first_index=index,
            token_ids=(token_id,),
            finish_reason=reason,
            stop_token_id=stop,
            logprobs=() if sampling.logprobs is None else (_scored(token_id, sampling.logprobs),),
            prompt_logprobs=self._prompt_logprobs() if (choice, index) == (0, 0) else (),
        )

    def _prompt_logprobs(self) -> tuple[TokenLogprob | None, ...]:
        count = self._request.sampling.prompt_logprobs
        if count is None:
            return ()
        return (None, *(_scored(token_id, count) for token_id in self._request.prompt_token_ids[1:]))


def _scored(token_id: int, count: int) -> TokenLogprob:
    top = tuple((other, -0.5 * (rank + 1)) for rank, other in enumerate([token_id, *range(len(WORDS))][:count]))
    return TokenLogprob(token_id=token_id, logprob=-0.5, top=top)


def make_text_service(tokenizer: Tokenizer, router: ScriptedRouter) -> TextService:
    return TextService("scripted", tokenizer, router, GatewayMetrics(_NoLinks()), LimitsConfig())


class _NoLinks:
    """A gateway without workers, as its metrics see it."""

    def samples(self) -> list[WorkerSample]:
        return []
