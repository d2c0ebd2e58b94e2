"""The hints of a traced sequence since its last step, for the step's trace."""

import collections
from dataclasses import dataclass

from verifier.drafts.draft_buffer import Source

# Limits between two steps, some 20 KB; the oldest proposals beyond them are dropped.
_MAX_PROPOSED_TOKENS = 4096
_MAX_PROPOSALS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalTrace:
    """A hint as received. `sampling.proto` documents the fields."""

    base_length: int
    token_ids: list[int]
    matched_ngram_length: int
    source: Source


class ProposalLog:
    """The latest proposals since a sequence's last step, in order."""

    def __init__(self) -> None:
        self._proposals: collections.deque[ProposalTrace] = collections.deque()
        self._num_tokens = 0

    def append(self, proposal: ProposalTrace) -> None:
        self._proposals.append(proposal)
        self._num_tokens += len(proposal.token_ids)
        while len(self._proposals) > _MAX_PROPOSALS or self._num_tokens > _MAX_PROPOSED_TOKENS:
            self._num_tokens -= len(self._proposals.popleft().token_ids)

    def drain(self) -> list[ProposalTrace]:
        """Returns and removes all of them."""
        drained = list(self._proposals)
        self._proposals.clear()
        self._num_tokens = 0
        return drained
