"""The drafts that a step could verify, and how many of each sequence's it should.

A sequence's limits come first, and its grammar's. Then the depth policy, if there is one, chooses
by what drafts cost and bring. Sequences under DRAFT_WAIT_ALWAYS are none of its concern: they
verify all the drafts that they are given, within their limits. Nor are texts that a grammar forces.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from tandem.values import DraftSource, DraftWait
from verifier.drafts.depth_policy import DepthPolicy, DraftCandidate
from verifier.drafts.draft_limits import num_drafts_trusted, num_drafts_useful
from verifier.drafts.hint_requests import DECLINED_STEPS_BEFORE_PROBING
from verifier.scheduling.prefill_order import num_missing_tokens
from verifier.scheduling.sequence import Sequence
from verifier.structured.grammar_state import GrammarState

# As `verifier.drafts.acceptance` counts them.
_SOURCE_CLASSES = {None: 0, DraftSource.SEQUENCE: 1, DraftSource.POOL: 2}


@dataclass(slots=True, kw_only=True)
class SelectedDraft:
    """A decoding sequence's drafts.

    Attributes:
        token_ids: those within its own limits.
        depth: how many of them to verify. None: as many as there is room for.
        candidate: as the policy knows them. None: it does not choose their depth.
    """

    token_ids: list[int]
    depth: int | None = None
    candidate: DraftCandidate | None = None
    # Whether a grammar leaves no choice about their text.
    is_forced: bool = False


# Shared by all sequences without drafts: never changed.
_NO_DRAFT = SelectedDraft(token_ids=[])


def draft_within_limits(sequence: Sequence) -> SelectedDraft:
    """The hint's tokens that the request and the hint's match allow, up to the last that could
    bring a token more; without a hint, what a grammar forces. The step's room may cut them further.
    """
    grammar, buffer = sequence.grammar, sequence.draft_buffer
    if grammar is None and not buffer:
        return _NO_DRAFT
    length = len(sequence.token_ids)
    # A draft needs room for itself and one more.
    limit = min(sequence.num_speculative_tokens, sequence.max_length - length - 1)
    if limit <= 0:
        return _NO_DRAFT
    if grammar is not None:
        grammar.take_in(sequence.token_ids, sequence.prompt_length)
    if not buffer:
        return _forced(grammar, limit)
    trusted = num_drafts_trusted(
        tokens_per_match=sequence.tokens_per_match, match_length=buffer.match_length(length)
    )
    token_ids = buffer.ahead(length, limit if trusted is None else min(limit, trusted))
    num_useful = num_drafts_useful(token_ids, stop_token_ids=sequence.stop_token_ids)
    if grammar is not None:
        num_useful = grammar.num_possible(token_ids[:num_useful])
    if not num_useful:
        return _forced(grammar, limit)
    return SelectedDraft(
        token_ids=token_ids[:num_useful] if num_useful < len(token_ids) else token_ids
    )


def _forced(grammar: GrammarState | None, limit: int) -> SelectedDraft:
    """What the grammar leaves no choice about, where there is no other draft."""
    if grammar is None:
        return _NO_DRAFT
    return SelectedDraft(token_ids=grammar.forced(limit), is_forced=True)


def why_undrafted(sequence: Sequence, draft: SelectedDraft) -> str:
    """Why none of a decoding sequence's drafts is verified in this step: a field of
    `UndraftedSteps`. Hot path.
    """
    buffer, length = sequence.draft_buffer, len(sequence.token_ids)
    # What is resumed only stands in for the hint that is missing.
    is_resumed = draft.candidate is not None and buffer.is_resumed
    if draft.token_ids and not is_resumed:
        return "declined" if draft.depth == 0 else "limited"
    if sequence.max_length - length <= 1:
        return "limited"
    if buffer and not is_resumed:
        # What is left of the hint begins with a token that is not to be drafted.
        return "limited" if sequence.grammar is None else "forbidden"
    if buffer.answered_length >= length:
        return "no_match"
    is_wanted = sequence.num_wanted_draft_tokens > 0
    if not is_wanted and sequence.depth_record.num_declined >= DECLINED_STEPS_BEFORE_PROBING:
        return "declined"
    # If those that came were empty or wrong, a faster drafter would bring nothing.
    record = sequence.hint_record
    return "no_match" if record.num_hints and record.first_token_probability < 0.5 else "late"


def choose_depths(
    policy: DepthPolicy,
    decoding: SequenceOf[Sequence],
    drafts: SequenceOf[SelectedDraft],
    prefilling: SequenceOf[Sequence],
    *,
    budget: int,
    draft_budget: int,
) -> None:
    """Lets the policy set the depths of all drafts but those under DRAFT_WAIT_ALWAYS.

    Args:
        drafts: of the decoding sequences.
        prefilling: compute chunks of their prompts in the same step.
        budget: the step's tokens for drafts and chunks.
        draft_budget: the most drafts.
    """
    candidates: list[DraftCandidate] = []
    num_other_drafts = 0
    for sequence, draft in zip(decoding, drafts, strict=True):
        if not draft.token_ids:
            continue
        if sequence.draft_wait is DraftWait.ALWAYS or draft.is_forced:
            num_other_drafts += len(draft.token_ids)
            continue
        length, buffer = len(sequence.token_ids), sequence.draft_buffer
        draft.candidate = DraftCandidate(
            sequence.depth_record,
            _SOURCE_CLASSES[buffer.source],
            # A hint may claim a longer match than there is text.
            min(buffer.match_length(length), length),
            buffer.is_resumed,
            draft.token_ids,
        )
        candidates.append(draft.candidate)
    if not candidates:
        return
    depths = policy.choose(
        candidates,
        num_sequences=len(decoding),
        num_rows=len(decoding) + num_other_drafts,
        num_chunk_rows=min(budget, sum(map(num_missing_tokens, prefilling))),
        max_drafts=draft_budget,
    )
    chosen = (draft for draft in drafts if draft.candidate is not None)
    for draft, depth in zip(chosen, depths, strict=True):
        draft.depth = depth
