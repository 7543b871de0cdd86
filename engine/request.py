"""One request inside an engine: known tokens, computed tokens, blocks.

There are no phases: a request has known tokens (prompt and generated) and computed ones (their KV is in its blocks),
and the scheduler closes the gap. A prompt, a decode step and a recompute after preemption differ only in the gap.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kv_store.block_table import BlockTable
from messages.handoff import BlockKey
from messages.requests import GenerationRequest, RequestId, SamplingParams
from messages.tokens import FinishReason, TokenEvent


class Part(StrEnum):
    """The part of a request's life that this worker plays."""

    WHOLE = "whole"
    PREFILL = "prefill"
    """Ends after token 1; the blocks stay until the hand-off lets them go."""
    DECODE = "decode"
    """Begins with blocks pulled from another worker and token 1."""


@dataclass(slots=True, eq=False, kw_only=True)
class RequestState:
    """A request's mutable state, owned by the engine thread."""

    request: GenerationRequest
    part: Part
    root: BlockKey
    """Where the request's key chain begins: model, adapter, salt, codec."""
    keys: list[BlockKey]
    """Keys of the full blocks of `tokens`, extended as blocks fill."""
    arrived_s: float
    max_uncached_tokens: int | None = None
    """Refuse when more prompt tokens than this must be computed here; None: no limit."""
    tokens: list[int] = field(default_factory=list)
    table: BlockTable | None = None
    num_computed: int = 0
    num_cached: int = 0
    """Prompt tokens found in the local prefix cache at the first admission."""
    computed_prompt_tokens: int = 0
    """Prompt tokens that this worker ran, recomputes included."""
    is_received: bool = False
    """DECODE only: the pull is over, whatever it brought."""
    is_accepted: bool = False
    """Admitted once; counters and events of admission happen once."""
    admitted_s: float = 0.0
    prefill_done_s: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_token_ids)

    @property
    def request_id(self) -> RequestId:
        """The request's id."""
        return self.request.request_id

    @property
    def sampling(self) -> SamplingParams:
        """The request's sampling parameters."""
        return self.request.sampling

    @property
    def num_prompt(self) -> int:
        """Prompt length in tokens."""
        return len(self.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        """Tokens after the prompt, token 1 among them even when another worker sampled it."""
        return len(self.tokens) - self.num_prompt

    @property
    def gap(self) -> int:
        """Known tokens whose KV is not there yet."""
        return len(self.tokens) - self.num_computed

    def advance(self, num_tokens: int) -> None:
        """Note that the next `num_tokens` known tokens have their KV now."""
        below_prompt = max(0, min(self.num_computed + num_tokens, self.num_prompt) - self.num_computed)
        self.computed_prompt_tokens += below_prompt
        self.num_computed += num_tokens

    def accept(self, token_ids: Sequence[int]) -> TokenEvent:
        """Append sampled tokens, cut at the first end token or at the limit.

        Returns:
            The event for the client; its `finish_reason` is None while the request goes on.
        """
        first_index = self.num_generated
        accepted: list[int] = []
        reason: FinishReason | None = None
        for token_id in token_ids:
            accepted.append(token_id)
            if token_id in self.sampling.stop_token_ids:
                reason = FinishReason.STOP
            elif first_index + len(accepted) >= self.sampling.max_tokens:
                reason = FinishReason.LENGTH
            if reason is not None:
                break
        self.tokens.extend(accepted)
        return TokenEvent(
            request_id=self.request_id, first_index=first_index, token_ids=tuple(accepted), finish_reason=reason
        )
