"""The golden trace, and its steps as a client receives them.

The file has 13 steps of one request. The rest follows from it: the n-gram that each proposal
continues (by brute force), and, with blocks 0 and 1 of 16 tokens, slots equal to positions.
"""

import json
from pathlib import Path
from typing import Any

from drafter.ngram.params import NgramParams
from tandem.client import DraftSource, MatchAcceptance, ProposalTrace, StepTrace, Usage
from tests.drafter import brute_force

FILE = Path(__file__).parent / "data" / "golden_trace.json"
TRACE: dict[str, Any] = json.loads(FILE.read_text())
TEXT: list[int] = TRACE["prompt_token_ids"] + TRACE["target_continuation"]
PARAMS = NgramParams(min_ngram=TRACE["prompt_lookup_min"], max_ngram=TRACE["prompt_lookup_max"])


def is_requested(length: int) -> bool:
    """Whether a draft of one token, and one more token, have room after `length` tokens."""
    return bool(TRACE["max_model_len"] - length > 1)


def proposal(length: int) -> ProposalTrace:
    """The drafter's proposal for the first `length` tokens, by brute force."""
    max_draft_tokens = min(TRACE["num_speculative_tokens"], TRACE["max_model_len"] - length)
    draft, match_length = brute_force.propose(TEXT[:length], PARAMS, max_draft_tokens) or ([], 0)
    return ProposalTrace(
        base_length=length,
        token_ids=tuple(draft),
        matched_ngram_length=match_length,
        source=DraftSource.SEQUENCE if draft else None,
    )


def steps() -> list[StepTrace]:
    """Every step, with the requested proposals that arrived before it."""
    made: list[StepTrace] = []
    for written in TRACE["steps"]:
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in written.items()
            if name not in ("step", "proposal_after")
        }
        proposals: tuple[ProposalTrace, ...] = ()
        if made and is_requested(made[-1].context_length_after):
            proposals = (proposal(made[-1].context_length_after),)
        made.append(
            StepTrace(
                step_id=written["step"],
                slot_mapping=fields["positions"],
                proposals=proposals,
                **fields,
            )
        )
    return made


def usage() -> Usage:
    """The request's usage, from the file's summary and steps."""
    summary = TRACE["summary"]
    drafted = [step for step in TRACE["steps"] if step["draft_token_ids"]]
    positions = range(TRACE["num_speculative_tokens"])
    return Usage(
        prompt_tokens=len(TRACE["prompt_token_ids"]),
        output_tokens=len(TRACE["target_continuation"]),
        num_steps=summary["total_steps"],
        num_drafts=summary["steps_with_drafts"],
        num_draft_tokens=summary["num_draft_tokens"],
        num_accepted_tokens=summary["num_accepted_tokens"],
        accepted_per_position=tuple(
            sum(step["num_accepted_tokens"] > position for step in drafted)
            for position in positions
        ),
        by_match_length=_by_match_length(),
        num_sequence_drafts=summary["steps_with_drafts"],
    )


def _by_match_length() -> tuple[MatchAcceptance, ...]:
    counts: dict[int, list[int]] = {}
    for step in steps():
        if step.draft_token_ids:
            [its_proposal] = step.proposals
            sums = counts.setdefault(its_proposal.matched_ngram_length, [0, 0, 0])
            sums[0] += 1
            sums[1] += len(step.draft_token_ids)
            sums[2] += step.num_accepted_tokens
    return tuple(
        MatchAcceptance(
            matched_ngram_length=length,
            num_drafts=num_drafts,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
        )
        for length, (num_drafts, num_draft_tokens, num_accepted_tokens) in sorted(counts.items())
    )
