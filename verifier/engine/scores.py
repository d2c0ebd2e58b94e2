"""Hands out what a step tells about its scored rows."""

from verifier.batch.batch_layout import BatchLayout
from verifier.batch.target_model import FloatArray, StepResult
from verifier.engine.faults import FaultHandler
from verifier.engine.messages import PromptScored, Scored
from verifier.engine.observation import Fault
from verifier.engine.sequence_table import SequenceTable
from verifier.engine.step_batch import SequenceRows, StepBatch
from verifier.errors import NOT_FINITE_LOGITS, ModelOutputError
from verifier.sampling.scored_rows import (
    ScoredRows,
    are_finite,
    draft_positions,
    prompt_logprobs,
)
from verifier.scheduling.sequence import Sequence


class ScoreEmitter:
    """Owned by the engine thread."""

    def __init__(self, table: SequenceTable, faults: FaultHandler) -> None:
        self._table = table
        self._faults = faults

    def emit(self, batch: StepBatch, layout: BatchLayout, result: StepResult) -> None:
        """Queues the scores of the step's scored rows, and moves sequences forward that are only
        scored. A sequence with a row that is not finite is rejected.
        """
        for scored in batch.scored:
            if not scored.item.sequence.is_running:
                continue  # rejected in this step
            try:
                self._emit(scored, layout, result)
            except Exception as error:
                self._faults.fail(scored.item.sequence, Fault.SCORE, error)

    def _emit(self, scored: SequenceRows, layout: BatchLayout, result: StepResult) -> None:
        sequence = scored.item.sequence
        rows = result.logits_of(layout.scored_logits_indices[scored.indices])
        if scored.rows and not are_finite(rows):
            self._table.reject(sequence, ModelOutputError(NOT_FINITE_LOGITS))
            return
        if sequence.scoring is not None:
            sequence.num_computed_tokens += scored.item.num_new_tokens
        if not scored.rows:
            return
        sequence.rows_to_score = range(scored.rows.stop, sequence.rows_to_score.stop)
        if sequence.scoring is None:
            self._table.emit(sequence, _prompt_scored(sequence, scored.rows, rows))
        else:
            states = None
            if result.hidden_states is not None and sequence.scoring.keeps_hidden_states:
                states = result.hidden_states[scored.indices]
            self._table.emit(sequence, _scored(sequence, scored.rows, rows, states))


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
