"""Tells the depth policy what became of a step."""

from verifier.drafts.depth_policy import DepthOutcome, DepthPolicy, DraftCandidate
from verifier.drafts.step_cost import StepShape
from verifier.engine.observation import StepRecord


def learn_from_step(policy: DepthPolicy, record: StepRecord) -> DepthOutcome:
    """Lets the policy learn from a step, whose duration is taken without its wait for hints."""
    layout, verdict, duration_s = record.layout, record.verdict, record.stats.duration_s
    sampled = record.scheduled[: len(verdict.num_accepted_tokens)]
    num_sequences, num_rows = len(record.scheduled), layout.num_tokens
    # Each sequence computed its last token, and drafts.
    num_known = num_rows - len(layout.draft_token_ids)
    is_decoding = len(sampled) == num_sequences == num_known
    candidates: list[DraftCandidate] = []
    num_draft_tokens: list[int] = []
    entries: list[int] = []
    for entry, item in enumerate(sampled):
        if item.candidate is not None:
            candidates.append(item.candidate)
            num_draft_tokens.append(len(item.draft_token_ids))
            entries.append(entry)
    if is_decoding and num_rows == num_sequences and not candidates:
        outcome = policy.learn_plain(duration_s)
        if outcome is not None:
            return outcome
    shape = StepShape(
        num_sequences=num_sequences,
        num_logits_rows=layout.num_rows,
        num_attended=int(layout.positions.sum()) + num_rows,
        num_rows=num_rows,
    )
    plain_shape = None
    if is_decoding:
        plain_shape = StepShape(
            num_sequences=num_sequences,
            num_logits_rows=num_sequences,
            # A draft attends to about as many tokens as others do.
            num_attended=shape.num_attended * num_sequences // num_rows,
            num_rows=num_sequences,
        )
    return policy.learn(
        shape,
        plain_shape=plain_shape,
        duration_s=duration_s,
        candidates=candidates,
        num_draft_tokens=num_draft_tokens,
        entries=entries,
        num_accepted_tokens=verdict.num_accepted_tokens,
        output_token_ids=verdict.output_token_ids,
    )
