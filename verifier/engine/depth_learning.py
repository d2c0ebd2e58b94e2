"""Tells the depth policy what became of a step."""

from verifier.batch.batch_layout import BatchLayout
from verifier.drafts.depth_policy import DepthOutcome, DepthPolicy
from verifier.drafts.step_cost import StepShape
from verifier.engine.step_batch import StepBatch
from verifier.sampling.rejection_sampler import Verdict


def learn_from_step(
    policy: DepthPolicy, batch: StepBatch, layout: BatchLayout, verdict: Verdict, duration_s: float
) -> DepthOutcome:
    """`duration_s`: of the step, without its wait for hints."""
    num_sequences, num_rows = len(layout.seq_lens), layout.num_tokens
    # Each sequence computed its last token, and drafts.
    num_known = num_rows - len(layout.draft_token_ids)
    is_decoding = len(batch.sampled) == num_sequences == num_known
    num_candidates = policy.num_candidates
    if is_decoding and num_rows == num_sequences and not num_candidates:
        outcome = policy.learn_plain(duration_s)
        if outcome is not None:
            return outcome
    num_draft_tokens, entries = [0] * num_candidates, [-1] * num_candidates
    for entry, item in enumerate(batch.sampled):
        if item.candidate >= 0:
            num_draft_tokens[item.candidate] = len(item.draft_token_ids)
            entries[item.candidate] = entry
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
        num_draft_tokens=num_draft_tokens,
        entries=entries,
        num_accepted_tokens=verdict.num_accepted_tokens,
        output_token_ids=verdict.output_token_ids,
    )
