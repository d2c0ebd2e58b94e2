"""The hints of a traced sequence since its last step, for the step's trace."""

import collections

from tandem.values import ProposalTrace
from verifier.drafts.draft_buffer import Hint

# Limits between two steps, some 20 KB; the oldest hints beyond them are dropped.
_MAX_TOKENS = 4096
_MAX_HINTS = 64


class HintLog:
    """The latest hints since a sequence's last step, in order."""

    def __init__(self) -> None:
        self._hints: collections.deque[ProposalTrace] = collections.deque()
        self._num_tokens = 0

    def append(self, hint: Hint) -> None:
        self._hints.append(
            ProposalTrace(
                base_length=hint.base_length,
                token_ids=tuple(hint.token_ids),
                matched_ngram_length=hint.matched_ngram_length,
                source=hint.source,
            )
        )
        self._num_tokens += len(hint.token_ids)
        while len(self._hints) > _MAX_HINTS or self._num_tokens > _MAX_TOKENS:
            self._num_tokens -= len(self._hints.popleft().token_ids)

    def drain(self) -> tuple[ProposalTrace, ...]:
        """Returns and removes all of them."""
        drained = tuple(self._hints)
        self._hints.clear()
        self._num_tokens = 0
        return drained
