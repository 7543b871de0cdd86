"""One choice's place in a grammar: which tokens may come next, one step per token."""

from typing import Self

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer

from engine.grammar_library import has_given_up, next_tokens, reason_of
from engine.grammar_vocabulary import Vocabulary
from messages.errors import InvalidRequest, ServingError


class GrammarMatcher:
    """Follows one output; a function of the grammar and of the tokens accepted, and of nothing else.

    When the library gives up (the output has become too ambiguous for its limits) only end tokens are allowed, so that
    the other rows of the step go on, and `accept` raises.
    """

    def __init__(self, vocabulary: Vocabulary, tokenizer: LLTokenizer, state: LLMatcher) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer
        self._state = state
        self._is_at_start = True
        self.is_finished = False
        """An end token was accepted; only end tokens may follow."""

    @property
    def may_end(self) -> bool:
        """Whether what was accepted so far matches the grammar."""
        return self.is_finished or self._state.is_accepting()

    def fill_mask(self, allowed: torch.Tensor) -> None:
        """Write which tokens may come next: end tokens exactly where the output may end, control tokens never.

        Args:
            allowed: (V,), bool, on any device; every entry is written.
        """
        vocabulary = self._vocabulary
        mask = np.zeros(vocabulary.logits_width, dtype=np.bool_)
        ends = list(vocabulary.end_token_ids)
        if self.is_finished:
            mask[ends] = True
        else:
            found = next_tokens(self._state, self._tokenizer)
            if self._state.is_error():
                mask[ends] = True
            else:
                mask[: vocabulary.num_tokens] = found[: vocabulary.num_tokens]
                if self._is_at_start and len(vocabulary.first_ids):
                    mask[vocabulary.first_ids] = found[vocabulary.num_tokens : -1]
                mask[ends] = found[-1]
        allowed.copy_(torch.from_numpy(mask))

    def accept(self, token_id: int) -> None:
        """Go on by one token.

        Raises:
            InvalidRequest: The output has become too complex for the grammar library; the request cannot go on.
            ServingError: The grammar does not allow the token here; the request cannot go on.
        """
        if token_id in self._vocabulary.end_token_ids:
            is_allowed = self.may_end
            self.is_finished = is_allowed
        else:
            is_allowed = not self.is_finished and self._consume(token_id)
        if has_given_up(self._state):
            message = f"structured output: the grammar became too complex to follow ({reason_of(self._state)})"
            raise InvalidRequest(message, param="response_format")
        if not is_allowed:
            raise ServingError("the grammar does not allow this token here", token_id=token_id)

    def _consume(self, token_id: int) -> bool:
        if not 0 <= token_id < self._vocabulary.num_tokens:
            return False
        seen_as = self._vocabulary.first_form(token_id) if self._is_at_start else token_id
        # The library would take a token without bytes as allowed everywhere.
        if not self._vocabulary.tokens[seen_as] or not self._state.consume_token(seen_as):
            return False
        self._is_at_start = False
        return True

    def fork(self) -> Self:
        """An independent matcher in the same state; costs microseconds."""
        copy = type(self)(self._vocabulary, self._tokenizer, self._state.deep_copy())
        copy._is_at_start = self._is_at_start  # noqa: SLF001 - its own class
        copy.is_finished = self.is_finished
        return copy
