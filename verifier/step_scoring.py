"""The scored rows of one step: where they lie in the batch, and what becomes of them.

Two kinds of sequences have rows to score: those that are continued and asked for prompt logprobs,
and those that are only scored (`Score`). The former are laid out as ever, with further logits rows
for their prefill chunks. The latter stand behind them in the batch, are computed like prompts, and
never sampled from; by batch expansion, each of their draft rows is an entry of its own.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from verifier.batch_expansion import DraftedSequence, expand
from verifier.batch_layout import BatchLayout, ScheduledTokens
from verifier.errors import NOT_FINITE_KV, NOT_FINITE_LOGITS, ModelOutputError
from verifier.messages import PromptScored, Scored
from verifier.rejection_sampler import BoolArray
from verifier.scheduler import ScheduledSequence
from verifier.scored_rows import (
    ScoredRows,
    are_finite,
    draft_positions,
    prompt_logprobs,
)
from verifier.sequence import ScoringMethod, Sequence
from verifier.sequence_table import SequenceTable
from verifier.target_model import KeepsHiddenStates, TargetModel


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnedRows:
    """Scored rows of one sequence."""

    item: ScheduledSequence
    # By position of the token that they follow.
    rows: range
    # Where they are among the step's scored rows.
    places: list[int]


class StepScoring:
    """Made for each step by the engine; owns what it knows of the step's scored rows.

    Attributes:
        scheduled: the step's sequences, those that are only scored last.
        sampled: the scheduled sequences that get a token, in their order. In the batch they come
            first, one entry each.
        continued: these, and then those whose prompt does not end in this step, one entry each.
        entries: the entries behind them, of the sequences that are only scored.
        wants_hidden_states: whether any row's is asked for.
    """

    def __init__(self, scheduled: SequenceOf[ScheduledSequence]) -> None:
        continued = [item for item in scheduled if item.sequence.scoring is None]
        self.sampled = [item for item in continued if item.samples]
        self.continued = self.sampled + [item for item in continued if not item.samples]
        self.entries: list[ScheduledTokens] = []
        # Of each entry of the batch.
        self._owners = [item.sequence for item in self.continued]
        self._owned: list[_OwnedRows] = []
        self._num_rows = 0
        self.wants_hidden_states = False
        scored = [item for item in scheduled if item.sequence.scoring is not None]
        self.scheduled = self.continued + scored
        for item in self.continued:
            if item.sequence.rows_to_score:
                rows = item.sequence.scored_rows(item.num_new_tokens)
                self._own(item, rows, self._take(len(rows)))
        if scored:
            self._add_entries(scored)

    def offsets_of(self, sequence: Sequence, num_new_tokens: int) -> range:
        """Which of a sampled sequence's next tokens have rows to score."""
        if not sequence.rows_to_score:
            return range(0)
        start, rows = sequence.num_computed_tokens, sequence.scored_rows(num_new_tokens)
        return range(rows.start - start, rows.stop - start)

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
            sequence = self._owners[entry]
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

    def _add_entries(self, scored: list[ScheduledSequence]) -> None:
        expanded: list[tuple[ScheduledSequence, list[int], int]] = []
        for item in scored:
            sequence = item.sequence
            start = sequence.num_computed_tokens
            end = start + item.num_new_tokens
            rows = sequence.scored_rows(item.num_new_tokens)
            first_alone = _first_expanded_row(sequence, end)
            places: list[int] = []
            if start < first_alone:
                self._owners.append(sequence)
                together = range(min(rows.start, first_alone), min(rows.stop, first_alone))
                places += self._take(len(together))
                self.entries.append(
                    ScheduledTokens(
                        token_ids=sequence.token_ids[start:first_alone],
                        draft_token_ids=[],
                        num_computed_tokens=start,
                        block_table=sequence.block_table,
                        scored_offsets=range(together.start - start, together.stop - start),
                    )
                )
            if first_alone < end:
                expanded.append((item, places, max(start, first_alone)))
            self._own(item, rows, places)
            if sequence.scoring is not None and rows:
                self.wants_hidden_states |= sequence.scoring.keeps_hidden_states
        self._expand(expanded)

    def _expand(self, expanded: list[tuple[ScheduledSequence, list[int], int]]) -> None:
        """Adds an entry for each row from the given one on, and their places to the lists."""
        batch = expand(
            [
                DraftedSequence(
                    sequence_id=item.sequence.sequence_id,
                    token_ids=item.sequence.token_ids[: first + 1],
                    draft_token_ids=item.sequence.token_ids[
                        first + 1 : item.sequence.num_computed_tokens + item.num_new_tokens
                    ],
                    sampling=item.sequence.sampling,
                    block_table=item.sequence.block_table,
                )
                for item, _, first in expanded
            ]
        )
        first_place = self._num_rows
        self._take(len(batch.rows))
        owners = {
            row: item.sequence
            for (item, _, _), place in zip(expanded, batch.places, strict=True)
            for row in place
        }
        self._owners += [owners[row] for row in range(len(batch.rows))]
        for row in batch.rows:
            self.entries.append(
                ScheduledTokens(
                    token_ids=row.token_ids[row.num_computed_tokens :],
                    draft_token_ids=[],
                    num_computed_tokens=row.num_computed_tokens,
                    block_table=row.block_table,
                    scored_offsets=range(1),
                )
            )
        for (_, places, _), place in zip(expanded, batch.places, strict=True):
            places += [first_place + row for row in place]

    def _own(self, item: ScheduledSequence, rows: range, places: list[int]) -> None:
        self._owned.append(_OwnedRows(item=item, rows=rows, places=places))

    def _take(self, num_rows: int) -> list[int]:
        first = self._num_rows
        self._num_rows += num_rows
        return list(range(first, first + num_rows))


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
    positions, tensors = draft_positions(
        logits[num_prompt_rows:],
        prompt_token_ids=prompt,
        draft_token_ids=sequence.token_ids[sequence.prompt_length :],
        first_draft=max(0, rows.start - first_draft_row),
        sampling=sequence.sampling,
        stop_token_ids=sequence.stop_token_ids,
        num_top=sequence.scoring.num_top,
        keeps_law=sequence.scoring.keeps_law,
    )
    if hidden_states is not None:
        tensors = dataclasses.replace(tensors, hidden_states=hidden_states[num_prompt_rows:])
    return Scored(
        sequence_id=sequence.sequence_id,
        scored=ScoredRows(prompt_logprobs=of_prompt, positions=positions, tensors=tensors),
        is_last=not sequence.rows_to_score,
    )


def _first_expanded_row(sequence: Sequence, end: int) -> int:
    """From which token of a chunk on each is an entry of its own; `end`: from none."""
    assert sequence.scoring is not None
    if sequence.scoring.method is not ScoringMethod.BATCH_EXPANSION:
        return end
    # Of a sequence that is computed again, rows that were told are part of the chunk.
    return min(end, max(sequence.prompt_length - 1, sequence.rows_to_score.start))
