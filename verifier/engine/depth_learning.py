"""Tells the depth policy what became of a step."""

from verifier.drafts.depth_policy import DepthOutcome, DepthPolicy, DraftCandidate
from verifier.engine.observation import StepRecord


def learn_from_step(policy: DepthPolicy, record: StepRecord) -> DepthOutcome:
    """Lets the policy learn from a step, whose duration is taken without its wait for hints."""
    layout, verdict = record.layout, record.verdict
    sampled = record.scheduled[: len(verdict.num_accepted_tokens)]
    num_sequences, num_rows = len(record.scheduled), layout.num_tokens
    # Each sequence computed its last token, and drafts.
    is_decoding = len(sampled) == num_sequences == num_rows - len(layout.draft_token_ids)
    candidates: list[DraftCandidate] = []
    num_draft_tokens: list[int] = []
    entries: list[int] = []
    for entry, item in enumerate(sampled):
        if item.candidate is not None:
            candidates.append(item.candidate)
            num_draft_tokens.append(len(item.draft_token_ids))
            entries.append(entry)
    return policy.learn(
        num_rows=num_rows,
        num_plain_rows=num_sequences if is_decoding else 0,
        duration_s=record.stats.duration_s,
        candidates=candidates,
        num_draft_tokens=num_draft_tokens,
        entries=entries,
        num_accepted_tokens=verdict.num_accepted_tokens,
        output_token_ids=verdict.output_token_ids,
    )
