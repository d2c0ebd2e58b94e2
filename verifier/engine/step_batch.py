"""The sequences of one step: as batch entries, as rows to verify, and as rows to score.

Two kinds of sequences have rows to score: generating ones that were opened with prompt logprobs,
and those that are only scored (`Score`). The former get further logits rows for their prefill
chunks. The latter stand at the end of the batch, are computed like prompts and are never sampled;
under batch expansion, each of their draft rows attends alone.
"""

import contextlib
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from verifier.batch.batch_layout import ScheduledTokens
from verifier.batch.target_model import StepSampling
from verifier.sampling.adjustments import Adjustments
from verifier.sampling.logits_processing import History
from verifier.sampling.parameters import Sampling
from verifier.sampling.rejection_sampler import AcceptanceRule, JudgedSequence
from verifier.scheduling.scheduler import ScheduledSequence
from verifier.scheduling.sequence import ScoringMethod

_NO_OFFSETS = range(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRows:
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
        scored: the rows of this step that are scored, sequence after sequence.
        wants_hidden_states: whether hidden states of any row were requested.
        failures: by index among `sampled`, of those whose sampling could not be prepared.
    """

    def __init__(
        self,
        scheduled: SequenceOf[ScheduledSequence],
        verification: ScoringMethod = ScoringMethod.SINGLE_PASS,
    ) -> None:
        """`verification`: how drafts are computed that are verified; `Scoring` has its own."""
        self.sampled: list[ScheduledSequence] = []
        chunks: list[ScheduledSequence] = []
        only_scored: list[ScheduledSequence] = []
        for item in scheduled:
            if item.is_sampled:
                self.sampled.append(item)
            elif item.sequence.scoring is None:
                chunks.append(item)
            else:
                only_scored.append(item)
        self.continued = self.sampled + chunks
        self.scheduled = self.continued + only_scored
        self.scored: list[SequenceRows] = []
        self.wants_hidden_states = False
        self.failures: dict[int, Exception] = {}
        self._verification = verification
        self._num_scored_rows = 0
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
                self.failures[index] = error
                sequences.append(_unjudged(item))
        return StepSampling(sequences=sequences, rule=rule)

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
            item.is_sampled,
            scored_offsets,
            self._num_expanded_tokens(item),
        )

    def _add_scored(self, item: ScheduledSequence) -> range:
        """Adds the rows of a sequence that are scored in this step; returns them."""
        rows = item.sequence.scored_rows(item.num_new_tokens)
        first = self._num_scored_rows
        self._num_scored_rows += len(rows)
        self.scored.append(
            SequenceRows(item=item, rows=rows, indices=slice(first, self._num_scored_rows))
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
