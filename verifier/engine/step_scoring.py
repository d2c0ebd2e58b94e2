"""A step's entries, and the scored rows among them: where they lie, and what becomes of them.

Two kinds of sequences have rows to score: those that are continued and asked for prompt logprobs,
and those that are only scored (`Score`). The former are laid out as ever, with further logits rows
for their prefill chunks. The latter stand behind them in the batch, are computed like prompts, and
never sampled from; by batch expansion, each of their draft rows attends alone.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from verifier.batch.batch_layout import BatchLayout, ScheduledTokens
from verifier.batch.target_model import KeepsHiddenStates, TargetModel
from verifier.engine.messages import PromptScored, Scored
from verifier.engine.sequence_table import SequenceTable
from verifier.errors import NOT_FINITE_KV, NOT_FINITE_LOGITS, ModelOutputError
from verifier.sampling.rejection_sampler import BoolArray
from verifier.sampling.scored_rows import (
    ScoredRows,
    are_finite,
    draft_positions,
    prompt_logprobs,
)
from verifier.scheduling.scheduler import ScheduledSequence
from verifier.scheduling.sequence import ScoringMethod, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnedRows:
    """Scored rows of one sequence."""

    item: ScheduledSequence
    # By position of the token that they follow.
    rows: range
    # Where they are among the step's scored rows.
    places: slice


class StepScoring:
    """Made for each step by the engine; owns what it knows of the step's scored rows.

    Attributes:
        scheduled: the step's sequences, those that are only scored last.
        sampled: the scheduled sequences that get a token, in their order. In the batch they come
            first.
        continued: these, and then those whose prompt does not end in this step.
        entries: the batch's, one for each of `scheduled`.
        wants_hidden_states: whether any row's is asked for.
    """

    def __init__(
        self,
        scheduled: SequenceOf[ScheduledSequence],
        verification: ScoringMethod = ScoringMethod.SINGLE_PASS,
    ) -> None:
        """`verification`: how drafts are run that are verified; scored ones say it themselves."""
        continued = [item for item in scheduled if item.sequence.scoring is None]
        self.sampled = [item for item in continued if item.samples]
        self.continued = self.sampled + [item for item in continued if not item.samples]
        scored = [item for item in scheduled if item.sequence.scoring is not None]
        self.scheduled = self.continued + scored
        self.wants_hidden_states = False
        self._verification = verification
        self._owned: list[_OwnedRows] = []
        self._num_rows = 0
        self.entries = [self._entry(item) for item in self.scheduled]

    def sampled_rows(self, logits: torch.Tensor, layout: BatchLayout) -> torch.Tensor:
        """Of a step's logits [R, V] those that sampled sequences are judged by."""
        return logits[: int(layout.num_sampled_tokens[: len(self.sampled)].sum())]

    def reject_failed(
        self, table: SequenceTable, layout: BatchLayout, kv_is_finite: BoolArray
    ) -> None:
        """Rejects the sequences that have a token, and no draft, whose K/V is not finite. Nothing
        that was computed for them in this step counts, so no cache gets it.

        Args:
            kv_is_finite: [T].
        """
        failed = np.flatnonzero(~kv_is_finite)
        entries = np.searchsorted(layout.cu_seqlens_q, failed, side="right") - 1
        first_drafts = layout.cu_seqlens_q[1:] - layout.num_draft_tokens
        for entry in np.unique(entries[failed < first_drafts[entries]]).tolist():
            sequence = self.scheduled[entry].sequence
            if sequence.is_running:
                table.reject(sequence, ModelOutputError(NOT_FINITE_KV))

    def tell(
        self,
        table: SequenceTable,
        layout: BatchLayout,
        logits: torch.Tensor,
        model: TargetModel,
        fail: Callable[[Sequence, Exception], None],
    ) -> None:
        """Queues what the rows say, and moves the scored sequences forward. A sequence with a row
        that is not finite is rejected, and no longer runs; `fail` ends one that cannot be told of.

        Must come before the continued sequences move.
        """
        hidden_states = None
        if self.wants_hidden_states and isinstance(model, KeepsHiddenStates):
            hidden_states = model.hidden_states
        for owned in self._owned:
            if not owned.item.sequence.is_running:
                continue  # rejected in this step
            try:
                self._tell_one(owned, table, layout, logits, hidden_states)
            except Exception as error:
                fail(owned.item.sequence, error)

    def _tell_one(
        self,
        owned: _OwnedRows,
        table: SequenceTable,
        layout: BatchLayout,
        logits: torch.Tensor,
        hidden_states: torch.Tensor | None,
    ) -> None:
        sequence = owned.item.sequence
        indices = torch.from_numpy(layout.scored_logits_indices[owned.places])
        rows = logits[indices.to(logits.device)]
        if owned.rows and not are_finite(rows):
            table.reject(sequence, ModelOutputError(NOT_FINITE_LOGITS))
            return
        if sequence.scoring is not None:
            sequence.num_computed_tokens += owned.item.num_new_tokens
        if not owned.rows:
            return
        sequence.rows_to_score = range(owned.rows.stop, sequence.rows_to_score.stop)
        if sequence.scoring is None:
            table.tell_scores(sequence, _prompt_scored(sequence, owned.rows, rows))
        else:
            states = None
            if hidden_states is not None and sequence.scoring.keeps_hidden_states:
                states = hidden_states[owned.places].cpu()
            table.tell_scores(sequence, _scored(sequence, owned.rows, rows, states))

    def _entry(self, item: ScheduledSequence) -> ScheduledTokens:
        sequence = item.sequence
        start = sequence.num_computed_tokens
        rows = range(start, start)
        if sequence.rows_to_score:
            rows = self._own(item)
        return ScheduledTokens(
            token_ids=sequence.token_ids[start : start + item.num_new_tokens],
            draft_token_ids=item.draft_token_ids,
            num_computed_tokens=start,
            block_table=sequence.block_table,
            is_sampled=item.samples,
            scored_offsets=range(rows.start - start, rows.stop - start),
            num_expanded_tokens=self._num_expanded_tokens(item),
        )

    def _own(self, item: ScheduledSequence) -> range:
        """Which rows of a sequence are scored in this step."""
        rows = item.sequence.scored_rows(item.num_new_tokens)
        first = self._num_rows
        self._num_rows += len(rows)
        self._owned.append(_OwnedRows(item=item, rows=rows, places=slice(first, self._num_rows)))
        scoring = item.sequence.scoring
        if rows and scoring is not None and scoring.keeps_hidden_states:
            self.wants_hidden_states = True
        return rows

    def _num_expanded_tokens(self, item: ScheduledSequence) -> int:
        """How many of a sequence's last tokens attend one by one."""
        sequence = item.sequence
        method = self._verification if sequence.scoring is None else sequence.scoring.method
        if method is ScoringMethod.SINGLE_PASS:
            return 0
        if sequence.scoring is None:
            return len(item.draft_token_ids)
        # Of a sequence that is computed again, rows that were told are part of the chunk.
        first_alone = max(sequence.prompt_length - 1, sequence.rows_to_score.start)
        end = sequence.num_computed_tokens + item.num_new_tokens
        return max(0, end - max(first_alone, sequence.num_computed_tokens))


def _prompt_scored(sequence: Sequence, rows: range, logits: torch.Tensor) -> PromptScored:
    """What a chunk's rows [n, V] say of a prompt."""
    logprobs = prompt_logprobs(
        logits,
        sequence.token_ids[: rows.stop + 1],
        first_row=rows.start,
        sampling=sequence.sampling,
        num_top=sequence.sampling.prompt_logprobs or 0,
    )
    return PromptScored(
        sequence_id=sequence.sequence_id, base_length=rows.start + 1, logprobs=logprobs
    )


def _scored(
    sequence: Sequence, rows: range, logits: torch.Tensor, hidden_states: torch.Tensor | None
) -> Scored:
    """What rows [n, V] say of a sequence that is scored; `rows_to_score` has moved behind them."""
    assert sequence.scoring is not None
    prompt = sequence.token_ids[: sequence.prompt_length]
    first_draft_row = sequence.prompt_length - 1
    num_prompt_rows = max(0, min(rows.stop, first_draft_row) - rows.start)
    of_prompt = prompt_logprobs(
        logits[:num_prompt_rows],
        prompt,
        first_row=rows.start,
        sampling=sequence.sampling,
        num_top=sequence.scoring.num_top,
    )
    positions = draft_positions(
        logits[num_prompt_rows:],
        prompt_token_ids=prompt,
        draft_token_ids=sequence.token_ids[sequence.prompt_length :],
        first_draft=max(0, rows.start - first_draft_row),
        sampling=sequence.sampling,
        stop_token_ids=sequence.stop_token_ids,
        num_top=sequence.scoring.num_top,
        keeps_law=sequence.scoring.keeps_law,
        hidden_states=None if hidden_states is None else hidden_states[num_prompt_rows:],
    )
    return Scored(
        sequence_id=sequence.sequence_id,
        scored=ScoredRows(prompt_logprobs=of_prompt, positions=positions),
        is_last=not sequence.rows_to_score,
    )
