"""Where one sequence's output stands in its grammar."""

from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from verifier.errors import InvalidRequestError


class GrammarState:
    """Implements `Constraint`. Owned by one thread at a time.

    The output must be taken in before anything is asked. Where it does not follow the grammar, or
    the grammar is too complex, nothing is drafted, and `allowed` raises.
    """

    def __init__(self, matcher: LLMatcher, *, vocab_size: int, field: str) -> None:
        """Begins before the first output token.

        Args:
            matcher: its own.
            field: of the request, for errors.
        """
        self._matcher = matcher
        self._num_words = (vocab_size + 31) // 32
        self._field = field
        self._num_taken = 0

    @property
    def error(self) -> InvalidRequestError | None:
        """Why the output cannot go on, if it cannot."""
        if not self._matcher.is_error():
            return None
        reason = self._matcher.get_error() or "the output does not follow it"
        return InvalidRequestError(reason.splitlines()[0], field=self._field)

    def take_in(self, token_ids: SequenceOf[int], prompt_length: int) -> None:
        """Goes on by the output tokens that are new.

        Args:
            token_ids: all of the sequence, prompt included, drafts excluded.
        """
        new = token_ids[prompt_length + self._num_taken :]
        if new:
            self._num_taken += len(new)
            self._matcher.consume_tokens(list(new))

    def num_possible(self, draft_token_ids: SequenceOf[int]) -> int:
        """How many drafts, from the first on, the grammar allows."""
        if not draft_token_ids or self._matcher.is_error():
            return 0
        return self._matcher.validate_tokens(list(draft_token_ids))

    def forced(self, limit: int) -> list[int]:
        """At most `limit` tokens: the text that must come, as the tokenizer writes it. Other tokens
        are not allowed for it.
        """
        if limit <= 0 or self._matcher.is_error():
            return []
        forced: list[int] = self._matcher.compute_ff_tokens()
        return forced[:limit]

    def allowed(self, draft_token_ids: SequenceOf[int]) -> npt.NDArray[np.int32]:
        """See `Constraint`."""
        matcher = self._matcher
        masks = np.zeros((len(draft_token_ids) + 1, self._num_words), dtype=np.int32)
        num_taken = 0
        for row, token_id in enumerate((*draft_token_ids, None)):
            if not matcher.is_error():
                fill_next_token_bitmask(matcher, masks, row)
            if (error := self.error) is not None:
                raise error
            if token_id is None or not matcher.try_consume_tokens([token_id]):
                break
            num_taken += 1
        matcher.rollback(num_taken)
        return masks
