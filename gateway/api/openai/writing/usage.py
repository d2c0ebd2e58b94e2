"""What a whole answer cost: OpenAI's counts, and how its drafts fared.

Owns the sums over an answer's choices. A prompt counts once, however many choices it has: as its
first choice found it, since the others find what that one computed.
"""

import itertools
from typing import Any

from gateway.messages.response import Finished
from tandem.speculation_note import speculation_note
from tandem.values import Usage


class UsageTotal:
    """The cost of one answer; grows with its choices.

    Attributes:
        num_reasoning_tokens: of the choices' tokens, those of reasoning.
    """

    def __init__(self, *, has_prediction: bool = False) -> None:
        """`has_prediction`: the client told what the answer may repeat."""
        self._has_prediction = has_prediction
        self._prompts: list[Usage] = []
        self._choices: list[Usage] = []
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._num_of_choice: dict[int, int] = {}
        self.num_reasoning_tokens = 0

    def start(self, num_prompt_tokens: int) -> None:
        """A prompt began to run."""
        self._num_prompt_tokens += num_prompt_tokens

    def grow(self, index: int, num_output_tokens: int) -> None:
        """A choice of the answer has so many tokens now."""
        self._num_output_tokens += num_output_tokens - self._num_of_choice.get(index, 0)
        self._num_of_choice[index] = num_output_tokens

    def add_reasoning(self, num_tokens: int) -> None:
        """So many tokens of a choice are of reasoning."""
        self.num_reasoning_tokens += num_tokens

    def so_far(self) -> dict[str, int]:
        """OpenAI's counts, of an answer that goes on."""
        return _counts(self._num_prompt_tokens, self._num_output_tokens)

    def add(self, finished: Finished) -> None:
        """A choice of one of the prompts ended."""
        if finished.choice_index == 0:
            self._prompts.append(finished.usage)
        self._choices.append(finished.usage)

    def to_json(self) -> dict[str, Any]:
        """OpenAI's `usage`, with the extension `speculation`."""
        prompts, choices = self._prompts, self._choices
        prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
        completion_tokens = sum(usage.output_tokens for usage in choices)
        return {
            **_counts(prompt_tokens, completion_tokens),
            "prompt_tokens_details": {
                "cached_tokens": sum(usage.cached_tokens for usage in prompts)
            },
            "completion_tokens_details": {
                "reasoning_tokens": self.num_reasoning_tokens,
                **(self._predicted() if self._has_prediction else {}),
            },
            "speculation": self._speculation(),
        }

    def _predicted(self) -> dict[str, int]:
        """OpenAI's counts of a prediction: of all drafts, wherever they are from."""
        num_draft_tokens = sum(usage.num_draft_tokens for usage in self._choices)
        num_accepted_tokens = sum(usage.num_accepted_tokens for usage in self._choices)
        return {
            "accepted_prediction_tokens": num_accepted_tokens,
            "rejected_prediction_tokens": num_draft_tokens - num_accepted_tokens,
        }

    def _speculation(self) -> dict[str, Any]:
        choices = self._choices
        num_drafts = sum(usage.num_drafts for usage in choices)
        num_draft_tokens = sum(usage.num_draft_tokens for usage in choices)
        num_accepted_tokens = sum(usage.num_accepted_tokens for usage in choices)
        positions = itertools.zip_longest(
            *(usage.accepted_per_position for usage in choices), fillvalue=0
        )
        return {
            "num_steps": sum(usage.num_steps for usage in choices),
            "num_drafts": num_drafts,
            "num_draft_tokens": num_draft_tokens,
            "num_accepted_tokens": num_accepted_tokens,
            "acceptance_rate": num_accepted_tokens / num_draft_tokens if num_draft_tokens else None,
            "mean_acceptance_length": 1 + num_accepted_tokens / num_drafts if num_drafts else None,
            "accepted_per_position": [sum(counts) for counts in positions],
            "by_match_length": self._by_match_length(),
            "num_sequence_drafts": sum(usage.num_sequence_drafts for usage in choices),
            "num_pool_drafts": sum(usage.num_pool_drafts for usage in choices),
            "resumes": sum(usage.resumes for usage in choices),
            "note": speculation_note(choices),
        }

    def _by_match_length(self) -> list[dict[str, int]]:
        sums: dict[int, list[int]] = {}
        for match in itertools.chain(*(usage.by_match_length for usage in self._choices)):
            counts = sums.setdefault(match.matched_ngram_length, [0, 0, 0])
            counts[0] += match.num_drafts
            counts[1] += match.num_draft_tokens
            counts[2] += match.num_accepted_tokens
        return [
            {
                "matched_ngram_length": length,
                "num_drafts": num_drafts,
                "num_draft_tokens": num_draft_tokens,
                "num_accepted_tokens": num_accepted_tokens,
            }
            for length, (num_drafts, num_draft_tokens, num_accepted_tokens) in sorted(sums.items())
        ]


def _counts(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
