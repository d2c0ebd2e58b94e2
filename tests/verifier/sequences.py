"""Sequences with defaults for the fields that a test does not care about."""

import itertools
from typing import Any

from tandem.values import DraftWait
from verifier.batch.batch_layout import ScheduledTokens
from verifier.sampling import Sampling
from verifier.scheduling.sequence import OpenSequence, Sequence

_ids = itertools.count(1)


def make_sequence(num_prompt_tokens: int = 4, *, num_output_tokens: int = 8, **fields: Any) -> (
    Sequence
):  # fmt: skip
    """A sequence as the engine holds it; its prompt is 0 1 2 ..."""
    token_ids = fields.pop("token_ids", list(range(num_prompt_tokens)))
    values: dict[str, Any] = {
        "sequence_id": f"s{next(_ids)}",
        "session_id": 1,
        "token_ids": token_ids,
        "prompt_length": len(token_ids),
        "max_length": len(token_ids) + num_output_tokens,
        "max_new_tokens": num_output_tokens,
        "sampling": Sampling(),
        "stop_token_ids": frozenset(),
        "draft_wait": DraftWait.NEVER,
        "drafting": True,
        "num_speculative_tokens": 7,
    }
    return Sequence(**(values | fields))


def make_open(token_ids: list[int], **fields: Any) -> OpenSequence:
    """A validated Open."""
    values: dict[str, Any] = {
        "sequence_id": f"s{next(_ids)}",
        "token_ids": token_ids,
        "prompt_length": len(token_ids),
        "sampling": Sampling(),
        "max_new_tokens": 8,
        "stop_token_ids": frozenset(),
        "draft_wait": DraftWait.NEVER,
        "drafting": True,
        "num_speculative_tokens": 7,
    }
    return OpenSequence(**(values | fields))


def num_scheduled_tokens(tokens: ScheduledTokens) -> int:
    return len(tokens.token_ids) + len(tokens.draft_token_ids)
