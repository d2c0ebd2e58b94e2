"""The sums of one choice's shown steps.

Owns how steps are counted for `Usage`. Knows no stream.
"""

from gateway.messages.response import Step
from tandem.values import DraftSource, MatchAcceptance, UndraftedSteps, Usage

# Longer matches are counted as matches of this length.
MAX_MATCH_LENGTH = 64


class UsageCounter:
    """Sums of the shown steps of one choice."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0
        self._accepted_per_position: list[int] = []
        # By match length: drafts, draft tokens, accepted tokens.
        self._by_match_length: dict[int, list[int]] = {}
        self._num_sequence_drafts = 0
        self._num_pool_drafts = 0

    def count(self, step: Step) -> None:
        """Adds one step."""
        self.num_steps += 1
        if not step.num_draft_tokens:
            return
        self._num_drafts += 1
        self._num_draft_tokens += step.num_draft_tokens
        self._num_accepted_tokens += step.num_accepted_tokens
        missing = step.num_draft_tokens - len(self._accepted_per_position)
        if missing > 0:
            self._accepted_per_position += [0] * missing
        for position in range(step.num_accepted_tokens):
            self._accepted_per_position[position] += 1
        counts = self._by_match_length.setdefault(step.matched_ngram_length, [0, 0, 0])
        counts[0] += 1
        counts[1] += step.num_draft_tokens
        counts[2] += step.num_accepted_tokens
        self._num_sequence_drafts += step.source is DraftSource.SEQUENCE
        self._num_pool_drafts += step.source is DraftSource.POOL

    def to_usage(
        self,
        *,
        prompt_tokens: int,
        output_tokens: int,
        cached_tokens: int,
        resumes: int,
        undrafted: UndraftedSteps | None,
    ) -> Usage:
        return Usage(
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            cached_tokens=cached_tokens,
            num_steps=self.num_steps,
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
            accepted_per_position=tuple(self._accepted_per_position),
            resumes=resumes,
            by_match_length=tuple(
                MatchAcceptance(
                    matched_ngram_length=length,
                    num_drafts=counts[0],
                    num_draft_tokens=counts[1],
                    num_accepted_tokens=counts[2],
                )
                for length, counts in sorted(self._by_match_length.items())
            ),
            num_sequence_drafts=self._num_sequence_drafts,
            num_pool_drafts=self._num_pool_drafts,
            undrafted=undrafted,
        )
