"""The sequences of one step: as batch entries, as rows to verify, and as rows to score.

Two kinds of sequences have rows to score: generating ones that were opened with prompt logprobs,
and those that are only scored (`Score`). The former get further logits rows for their prefill
chunks. The latter stand at the end of the batch, are computed like prompts and are never sampled;
under batch expansion, each of their draft rows attends alone.
"""

import contextlib
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from verifier.batch.batch_layout import BatchLayout, ScheduledTokens
from verifier.batch.target_model import FloatArray, StepResult, StepSampling
from verifier.engine.messages import PromptScored, Scored
from verifier.engine.observation import Fault
from verifier.engine.sequence_table import SequenceTable
from verifier.errors import NOT_FINITE_KV, NOT_FINITE_LOGITS, ModelOutputError
from verifier.sampling.adjustments import Adjustments
from verifier.sampling.logits_processing import History
from verifier.sampling.parameters import Sampling
from verifier.sampling.rejection_sampler import (
    AcceptanceRule,
    JudgedSequence,
)
from verifier.sampling.scored_rows import (
    ScoredRows,
    are_finite,
    draft_positions,
    prompt_logprobs,
)
from verifier.scheduling.scheduler import ScheduledSequence
from verifier.scheduling.sequence import ScoringMethod, Sequence

_NO_OFFSETS = range(0)

# Ends a sequence that raised an exception.
Fail = Callable[[Sequence, Fault, Exception], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _SequenceRows:
    """Scored rows of one sequence."""

    item: ScheduledSequence
    # Positions of the tokens that the rows follow.
    rows: range
    # The rows' indices among the step's scored rows.
    indices: slice


class StepBatch:
    """Made by the engine for each step.

    Attributes:
        scheduled: the step's sequences in batch order: `continued`, then those only scored.
        sampled: the sequences that get a token; the first ones of the batch.
        continued: `sampled`, then those whose prompt does not end in this step.
        entries: the batch's entries, one for each of `scheduled`.
        wants_hidden_states: whether hidden states of any row were requested.
    """

    def __init__(
        self,
        scheduled: SequenceOf[ScheduledSequence],
        verification: ScoringMethod = ScoringMethod.SINGLE_PASS,
    ) -> None:
        """`verification`: how drafts are computed that are verified; `Scoring` has its own."""
        self.sampled: list[ScheduledSequence] = []
        chunks: list[ScheduledSequence] = []
        scored: list[ScheduledSequence] = []
        for item in scheduled:
            if item.samples:
                self.sampled.append(item)
            elif item.sequence.scoring is None:
                chunks.append(item)
            else:
                scored.append(item)
        self.continued = self.sampled + chunks
        self.scheduled = self.continued + scored
        self.wants_hidden_states = False
        self._verification = verification
        self._scored: list[_SequenceRows] = []
        self._num_scored_rows = 0
        # By index among `sampled`, of those whose sampling could not be prepared.
        self._failures: dict[int, Exception] = {}
        self.entries = [self._entry(item) for item in self.scheduled]

    def compute_masks(self) -> None:
        """Computes the masks of the grammars that `sampled` follow; they keep them."""
        for item in self.sampled:
            if item.sequence.grammar is not None:
                # Whoever asks for the masks meets it again, and knows which sequence it ends.
                with contextlib.suppress(Exception):
                    item.sequence.grammar.allowed(item.draft_token_ids)

    def sampling(self, rule: AcceptanceRule) -> StepSampling:
        """What `sampled` are verified with. A sequence that makes this raise takes part in the step
        and is rejected after it.
        """
        sequences = []
        for index, item in enumerate(self.sampled):
            try:
                sequences.append(_judged(item))
            except Exception as error:
                self._failures[index] = error
                sequences.append(_unjudged(item))
        return StepSampling(sequences=sequences, rule=rule)

    def reject_failed(
        self, table: SequenceTable, layout: BatchLayout, result: StepResult, fail: Fail
    ) -> None:
        """Rejects sequences that have a token, drafts aside, whose K/V is not finite. They are not
        moved forward, so nothing computed for them in this step enters the prefix cache. Then those
        that could not be verified.
        """
        if result.kv_is_finite is not None:
            failed = np.flatnonzero(~result.kv_is_finite)
            entries = np.searchsorted(layout.cu_seqlens_q, failed, side="right") - 1
            first_drafts = layout.cu_seqlens_q[1:] - layout.num_draft_tokens
            for entry in np.unique(entries[failed < first_drafts[entries]]).tolist():
                table.reject(self.scheduled[entry].sequence, ModelOutputError(NOT_FINITE_KV))
        for index, error in {**result.failures, **self._failures}.items():
            sequence = self.sampled[index].sequence
            if sequence.is_running:
                fail(sequence, Fault.VERIFY, error)

    def emit_scores(
        self,
        table: SequenceTable,
        layout: BatchLayout,
        result: StepResult,
        fail: Fail,
    ) -> None:
        """Queues the scores of the step's scored rows, and moves sequences forward that are only
        scored. A sequence with a row that is not finite is rejected.

        Must come before `continued` moves forward.
        """
        for scored in self._scored:
            if not scored.item.sequence.is_running:
                continue  # rejected in this step
            try:
                self._emit_scores_of(scored, table, layout, result)
            except Exception as error:
                fail(scored.item.sequence, Fault.SCORE, error)

    def _emit_scores_of(
        self,
        scored: _SequenceRows,
        table: SequenceTable,
        layout: BatchLayout,
        result: StepResult,
    ) -> None:
        sequence = scored.item.sequence
        rows = result.logits_of(layout.scored_logits_indices[scored.indices])
        if scored.rows and not are_finite(rows):
            table.reject(sequence, ModelOutputError(NOT_FINITE_LOGITS))
            return
        if sequence.scoring is not None:
            sequence.num_computed_tokens += scored.item.num_new_tokens
        if not scored.rows:
            return
        sequence.rows_to_score = range(scored.rows.stop, sequence.rows_to_score.stop)
        if sequence.scoring is None:
            table.emit(sequence, _prompt_scored(sequence, scored.rows, rows))
        else:
            states = None
            if result.hidden_states is not None and sequence.scoring.keeps_hidden_states:
                states = result.hidden_states[scored.indices]
            table.emit(sequence, _scored(sequence, scored.rows, rows, states))

    def _entry(self, item: ScheduledSequence) -> ScheduledTokens:
        sequence = item.sequence
        start = sequence.num_computed_tokens
        scored_offsets = _NO_OFFSETS
        if sequence.rows_to_score:
            rows = self._add_scored(item)
            scored_offsets = range(rows.start - start, rows.stop - start)
        return ScheduledTokens(
            sequence.token_ids[start : start + item.num_new_tokens],
            item.draft_token_ids,
            start,
            sequence.block_table,
            sequence.table_id,
            item.samples,
            scored_offsets,
            self._num_expanded_tokens(item),
        )

    def _add_scored(self, item: ScheduledSequence) -> range:
        """Adds the rows of a sequence that are scored in this step; returns them."""
        rows = item.sequence.scored_rows(item.num_new_tokens)
        first = self._num_scored_rows
        self._num_scored_rows += len(rows)
        self._scored.append(
            _SequenceRows(item=item, rows=rows, indices=slice(first, self._num_scored_rows))
        )
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
        # When a preempted sequence is computed again, rows scored before belong to the chunk.
        first_alone = max(sequence.prompt_length - 1, sequence.rows_to_score.start)
        end = sequence.num_computed_tokens + item.num_new_tokens
        return max(0, end - max(first_alone, sequence.num_computed_tokens))


def _judged(item: ScheduledSequence) -> JudgedSequence:
    sequence = item.sequence
    end = sequence.num_computed_tokens + item.num_new_tokens
    if sequence.sampling.adjusts_logits:
        if sequence.adjustments is None:
            sequence.adjustments = Adjustments(
                sequence.sampling,
                prompt_length=sequence.prompt_length,
                stop_token_ids=sequence.stop_token_ids,
                constraint=sequence.grammar,
            )
        sequence.adjustments.count(sequence.token_ids)
    if sequence.grammar is not None:
        sequence.grammar.take_in(sequence.token_ids, sequence.prompt_length)
    history = History(sequence.adjustments, item.draft_token_ids)
    return JudgedSequence(sequence.sampling, history, end)


def _unjudged(item: ScheduledSequence) -> JudgedSequence:
    """Stands for a sequence whose verdict is not used."""
    history = History(adjustments=None, draft_token_ids=item.draft_token_ids)
    return JudgedSequence(sampling=Sampling(), history=history, first_position=0)


def _prompt_scored(sequence: Sequence, rows: range, logits: FloatArray) -> PromptScored:
    """The prompt logprobs that a chunk's rows [n, V] give."""
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
    sequence: Sequence, rows: range, logits: FloatArray, hidden_states: FloatArray | None
) -> Scored:
    """The scores that rows [n, V] give of a sequence that is only scored; `rows_to_score` already
    excludes them.
    """
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
        keeps_distributions=sequence.scoring.keeps_distributions,
        hidden_states=None if hidden_states is None else hidden_states[num_prompt_rows:],
    )
    return Scored(
        sequence_id=sequence.sequence_id,
        scored=ScoredRows(prompt_logprobs=of_prompt, positions=positions),
        is_last=not sequence.rows_to_score,
    )
