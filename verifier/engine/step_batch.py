"""The sequences of one step: as batch entries, as rows to verify, and as rows to score.

Two kinds of sequences have rows to score: generating ones that were opened with prompt logprobs,
and those that are only scored (`Score`). The former get further logits rows for their prefill
chunks. The latter stand at the end of the batch, are computed like prompts and are never sampled.

Under batch expansion, each draft row of a scored sequence is a batch entry of one query, after one
with the sequence's other tokens. Such an entry finds the K/V of the tokens before it because, in
every layer, K/V of all tokens is written before any token attends. Recurrent states are not found
so: where a model has them, a sequence is one entry.
"""

import contextlib
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from verifier.batch.batch_layout import ScheduledTokens, StateUse
from verifier.sampling.adjustments import Adjustments
from verifier.sampling.logits_processing import History
from verifier.sampling.parameters import Sampling
from verifier.sampling.rejection_sampler import JudgedSequence
from verifier.scheduling.scheduler import ScheduledSequence
from verifier.scheduling.sequence import ScoringMethod, Sequence
from verifier.scheduling.states import SequenceStates

_NO_ROWS = range(0)


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
        entries: the batch's entries, in the order of `scheduled`; one for each of `continued`.
        owners: each entry's sequence.
        scored: the rows of this step that are scored, sequence after sequence.
        wants_hidden_states: whether hidden states of any row were requested.
        failures: by index among `sampled`, of those whose sampling could not be prepared.
    """

    def __init__(self, scheduled: SequenceOf[ScheduledSequence]) -> None:
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
        self._num_scored_rows = 0
        self.entries: list[ScheduledTokens] = []
        self.owners: list[Sequence] = []
        for item in self.scheduled:
            self._add_entries(item)

    def compute_masks(self) -> None:
        """Computes the masks of the grammars that `sampled` follow; they keep them."""
        for item in self.sampled:
            if item.sequence.grammar is not None:
                # Whoever asks for the masks meets it again, and knows which sequence it ends.
                with contextlib.suppress(Exception):
                    item.sequence.grammar.allowed(item.draft_token_ids)

    def judged_sequences(self) -> list[JudgedSequence]:
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
        return sequences

    def _add_entries(self, item: ScheduledSequence) -> None:
        sequence = item.sequence
        start = sequence.num_computed_tokens
        end = start + item.num_new_tokens
        rows = self._add_scored(item) if sequence.rows_to_score else _NO_ROWS
        spans = [(start, end)]
        scoring = sequence.scoring
        is_expanded = scoring is not None and scoring.method is ScoringMethod.BATCH_EXPANSION
        if is_expanded and sequence.states is None:
            # When a preempted sequence is computed again, rows scored before belong to the chunk.
            first_alone = max(sequence.prompt_length - 1, sequence.rows_to_score.start, start)
            spans = [(start, min(first_alone, end))] if first_alone > start else []
            spans += [(position, position + 1) for position in range(first_alone, end)]
        for first, last in spans:
            self.owners.append(sequence)
            self.entries.append(
                ScheduledTokens(
                    sequence.token_ids[first:last],
                    item.draft_token_ids,
                    first,
                    sequence.block_table,
                    sequence.table_id,
                    item.is_sampled,
                    range(max(rows.start, first) - first, min(rows.stop, last) - first),
                    sequence.uses_long_rope,
                    None if sequence.states is None else state_use(sequence.states, end),
                )
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


def state_use(states: SequenceStates, end: int) -> StateUse:
    """Of a step that computes the tokens before `end`, drafts aside."""
    saves = tuple((each.num_tokens, each.slot) for each in states.saves if each.num_tokens <= end)
    return StateUse(states.slot, states.source, saves)


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
