"""Rows that sample, logits for them, and a grammar that allows a fixed set of tokens."""

from collections.abc import Sequence
from typing import Self

import torch
from hypothesis import strategies as st

from engine.batch import Row
from engine.sampler import sample
from messages.requests import RequestId, SamplingParams

VOCAB = 60


class FixedGrammar:
    def __init__(self, allowed: Sequence[int]) -> None:
        self._allowed = list(allowed)

    def fill_mask(self, allowed: torch.Tensor) -> None:
        allowed.zero_()
        allowed[self._allowed] = True

    def accept(self, token_id: int) -> None:
        assert token_id in self._allowed

    def fork(self) -> Self:
        return self


def make_row(
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (1,),
    generated: Sequence[int] = (),
    choices: tuple[int, ...] = (0,),
    grammar: Sequence[int] | None = None,
    end: int | None = None,
    request_id: str = "r",
) -> Row:
    end = len(prompt) + len(generated) if end is None else end
    return Row(
        request_id=RequestId(request_id),
        token_ids=(1,),
        start=end - 1,
        block_ids=((),),
        sampling=params,
        choices=choices,
        prompt=tuple(prompt),
        generated=list(generated),
        matcher=None if grammar is None else FixedGrammar(grammar),
    )


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    """Values of bfloat16, so that many are equal."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    return logits.bfloat16().float()


def tokens_of(logits: torch.Tensor, rows: Sequence[Row]) -> list[list[int]]:
    """Per row, the token of each of its choices."""
    return [[sampled.token_ids[0] for sampled in samples] for samples in sample(logits, rows)]


def tokens(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """Per row, the token of its first choice."""
    return [found[0] for found in tokens_of(logits, rows)]


IDS = st.integers(0, VOCAB - 1)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(100),
    temperature=st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.5]),
    top_k=st.sampled_from([0, 0, 1, 5, 50, 500]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    seed=st.integers(-5, 2**63),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5, -2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.5]),
    logit_bias=st.lists(st.tuples(IDS, st.floats(-100, 100, width=32)), max_size=3).map(tuple),
    allowed_token_ids=st.none() | st.lists(IDS, max_size=10).map(tuple),
    bad_words=st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=3).map(tuple),
    min_tokens=st.sampled_from([0, 0, 3]),
    end_token_ids=st.sampled_from([(), (2,), (2, 3)]),
    stop_token_ids=st.sampled_from([(), (7,)]),
    logprobs=st.sampled_from([None, None, 0, 4]),
)
ROWS = st.builds(
    make_row,
    PARAMS,
    prompt=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    generated=st.lists(st.integers(0, 5), max_size=6),
    choices=st.sampled_from([(0,), (0,), (3,), (0, 1, 2)]),
    grammar=st.none() | st.lists(IDS, max_size=10),
)
