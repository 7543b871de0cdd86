"""One request inside an engine: known tokens, computed tokens, blocks.

There are no phases: a request has known tokens (prompt and generated) and computed ones (their KV is in its blocks),
and the scheduler closes the gap. A prompt, a decode step and a recompute after preemption differ only in the gap.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from engine.batch import Matcher, Sampled
from kv_store.block_table import BlockTable
from messages.handoff import BlockKey
from messages.requests import GenerationRequest, RequestId, SamplingParams
from messages.tokens import FinishReason, TokenEvent, TokenLogprob


class Part(StrEnum):
    """The part of a request's life that this worker plays."""

    WHOLE = "whole"
    PREFILL = "prefill"
    """Ends after token 1; the blocks stay until the hand-off lets them go."""
    DECODE = "decode"
    """Begins with blocks pulled from another worker and token 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BorrowTerms:
    """What other workers are believed to hold of a prompt, and when fetching it pays."""

    max_tokens: int
    """Leading prompt tokens that can be borrowed at most."""
    min_tokens: int = 1
    """Fewest tokens that must be gained over what is cached here."""


@dataclass(slots=True, eq=False, kw_only=True)
class Totals:
    """What all choices of one request share and add up to on this worker."""

    arrived_s: float
    rank: int = 0
    """Order of arrival."""
    num_live: int = 1
    """Choices that have not ended."""
    computed_prompt_tokens: int = 0
    """Given tokens that this worker ran, recomputes included."""
    is_admitted: bool = False
    """Had its blocks once; the counters of admission happen once."""
    is_accepted: bool = False
    """Accepted or Allocated was sent; a request that borrows is admitted before."""
    was_preempted: bool = False
    admitted_s: float = 0.0
    prefill_done_s: float = 0.0


@dataclass(slots=True, eq=False, kw_only=True)
class RequestState:
    """One choice of a request, owned by the engine thread; choice 0 computes the prompt, the others fork from it."""

    request: GenerationRequest
    part: Part
    root: BlockKey
    """Where the request's key chain begins: model, adapter, salt, codec."""
    keys: list[BlockKey]
    """Keys of the full blocks of `tokens`, extended as blocks fill."""
    totals: Totals
    choice: int = 0
    max_uncached_tokens: int | None = None
    """Refuse when more given tokens than this must be computed here; None: no limit."""
    has_aside: bool = False
    """Blocks of it were set aside: it needs room twice until a silent owner goes on or dies."""
    borrow: BorrowTerms | None = None
    """Not yet used chance to borrow a prefix; never a DECODE part's."""
    matcher: Matcher | None = None
    """The grammar's state; None: none."""
    tokens: list[int] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    """The part of `tokens` after the prompt; what a replay brings is in it."""
    table: BlockTable | None = None
    num_computed: int = 0
    is_received: bool = False
    """DECODE only: the pull is over, whatever it brought."""
    siblings: list["RequestState"] = field(default_factory=list)
    """DECODE only: other choices, which get this one's prompt blocks as soon as the prompt has its KV."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens = list(self.request.known_token_ids)
            self.generated = list(self.request.generated_token_ids)

    @property
    def key(self) -> tuple[RequestId, int]:
        """What tells this choice from all others on a worker."""
        return self.request.request_id, self.choice

    @property
    def order(self) -> tuple[int, int, int]:
        """Who goes first: lower priority values, then earlier arrivals."""
        return self.request.priority, self.totals.rank, self.choice

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
    def num_given(self) -> int:
        """Tokens that came with the request: the prompt, and in a replay what was generated before."""
        return self.num_prompt + len(self.request.generated_token_ids)

    @property
    def is_started(self) -> bool:
        """Whether a token is known beyond those that came with the request."""
        return len(self.tokens) > self.num_given

    @property
    def gap(self) -> int:
        """Known tokens whose KV is not there yet."""
        return len(self.tokens) - self.num_computed

    @property
    def gap_after_borrowing(self) -> int:
        """What will be left of the gap of a request that borrows, if all goes well."""
        return 0 if self.borrow is None else max(1, len(self.tokens) - max(self.num_computed, self.borrow.max_tokens))

    @property
    def next_choices(self) -> tuple[int, ...]:
        """Choices to sample at the end of the known tokens."""
        is_first = not self.generated and self.sampling.n > 1
        return tuple(range(self.sampling.n)) if is_first else (self.choice,)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the prompt's log probabilities are still to be collected."""
        return self.sampling.prompt_logprobs is not None and not self.generated

    def advance(self, num_tokens: int) -> int:
        """Note that the next `num_tokens` known tokens have their KV now.

        Returns:
            How many of them came with the request.
        """
        given = max(0, min(self.num_computed + num_tokens, self.num_given) - self.num_computed)
        self.totals.computed_prompt_tokens += given
        self.num_computed += num_tokens
        return given

    def fork(self, choice: int, num_keys: int) -> "RequestState":
        """Another choice at the end of the given tokens, without blocks of its own yet.

        Args:
            choice: Its number.
            num_keys: Full blocks of the given tokens.
        """
        return RequestState(
            request=self.request,
            part=self.part,
            root=self.root,
            keys=self.keys[:num_keys],
            totals=self.totals,
            choice=choice,
            matcher=None if self.matcher is None else self.matcher.fork(),
            is_received=self.is_received,
        )

    def append(self, token_id: int) -> None:
        """Add a token that is known: sampled here, or token 1 from the prefill worker."""
        self.tokens.append(token_id)
        self.generated.append(token_id)
        if self.matcher is not None:
            self.matcher.accept(token_id)

    def accept(self, sampled: Sampled) -> TokenEvent:
        """Append sampled tokens, cut at the first end token or at the limit.

        Returns:
            The event for the client; its `finish_reason` is None while the choice goes on.
        """
        first_index = len(self.generated)
        reason: FinishReason | None = None
        stop_token_id: int | None = None
        for token_id in sampled.token_ids:
            self.append(token_id)
            if token_id in self.sampling.end_token_ids:
                reason = FinishReason.STOP
            elif token_id in self.sampling.stop_token_ids:
                reason, stop_token_id = FinishReason.STOP, token_id
            elif len(self.generated) >= self.sampling.max_tokens:
                reason = FinishReason.LENGTH
            if reason is not None:
                break
        accepted = tuple(self.generated[first_index:])
        prompt_logprobs = self._take_prompt_logprobs() if first_index == 0 and self.choice == 0 else ()
        return TokenEvent(
            request_id=self.request_id,
            choice=self.choice,
            first_index=first_index,
            token_ids=accepted,
            finish_reason=reason,
            stop_token_id=stop_token_id,
            logprobs=sampled.logprobs[: len(accepted)],
            prompt_logprobs=prompt_logprobs,
        )

    def _take_prompt_logprobs(self) -> tuple[TokenLogprob | None, ...]:
        if self.sampling.prompt_logprobs is None:
            return ()
        return (None, *self.prompt_logprobs)
