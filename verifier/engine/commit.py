"""Moves every sequence of a step forward by the step's result, and queues its events."""

import time
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from tandem.values import DraftWait, FinishReason, TokenLogprob, UndraftedSteps
from verifier.batch.batch_layout import BatchLayout
from verifier.batch.target_model import StepResult
from verifier.drafters.drafters import Drafters
from verifier.drafts.draft_buffer import HintOutcome
from verifier.drafts.hint_log import HintLog
from verifier.drafts.hint_requests import ProbePace, is_gain_unlikely, num_wanted_draft_tokens
from verifier.engine.faults import FaultHandler
from verifier.engine.messages import Decided, StepTraced
from verifier.engine.observation import Fault
from verifier.engine.scores import ScoreEmitter
from verifier.engine.sequence_table import SequenceTable
from verifier.engine.step_batch import StepBatch
from verifier.engine.step_trace import trace_of
from verifier.errors import NOT_FINITE_KV, NOT_FINITE_LOGITS, ModelOutputError
from verifier.scheduling.scheduler import ScheduledSequence
from verifier.scheduling.sequence import Sequence


class _VerdictLists(NamedTuple):
    """A step's verdict as lists: to read one element of an array takes as long as a call."""

    output_token_ids: list[list[int]]
    num_accepted_tokens: list[int]
    # Whether the row after the accepted drafts is usable.
    is_finite: list[bool]
    logprobs: dict[int, list[TokenLogprob]]


class _Decision(NamedTuple):
    """What a step decided for one sequence, until it is told.

    Attributes:
        entry: its place in the step's batch.
        decided: the event; None: the sequence got no token.
        is_finite: whether the row after the accepted drafts is usable.
    """

    entry: int
    item: ScheduledSequence
    decided: Decided | None
    is_finite: bool


class Committer:
    """Owned by the engine thread."""

    def __init__(
        self,
        table: SequenceTable,
        *,
        drafters: Drafters,
        hint_counts: dict[HintOutcome, int],
        faults: FaultHandler,
    ) -> None:
        self._table = table
        self._drafters = drafters
        self._hint_counts = hint_counts
        self._faults = faults
        self._scores = ScoreEmitter(table, faults)
        self._probe_pace = ProbePace()
        # When the current step was decided.
        self._now_s = 0.0

    def commit(
        self, batch: StepBatch, layout: BatchLayout, result: StepResult, step_id: int
    ) -> None:
        """Moves the sequences forward, and queues their events. Before these it sends the drafters
        their tokens, if the next step may wait for what they propose, and gain by it.
        """
        self._reject_failed(batch, layout, result)
        # Before what the step decided, which may end a sequence.
        self._scores.emit(batch, layout, result)
        verdict = result.verdict
        self._now_s = time.monotonic()
        self._probe_pace.begin_step(self._now_s)
        lists = _VerdictLists(
            verdict.output_token_ids.tolist(),
            verdict.num_accepted_tokens.tolist(),
            verdict.is_finite.tolist(),
            verdict.logprobs,
        )
        decisions: list[_Decision] = []
        for entry, item in enumerate(batch.continued):
            if not item.sequence.is_running:
                continue  # rejected in this step
            try:
                decisions.append(self._advance(entry, item, lists))
            except Exception as error:
                self._faults.fail(item.sequence, Fault.COMMIT, error)
        if any(_is_urgent(decision.item.sequence) for decision in decisions):
            self._drafters.flush()
        for decision in decisions:
            try:
                self._emit(decision, layout, step_id)
            except Exception as error:
                self._faults.fail(decision.item.sequence, Fault.COMMIT, error)

    def _reject_failed(self, batch: StepBatch, layout: BatchLayout, result: StepResult) -> None:
        """Rejects sequences that have a token, drafts aside, whose K/V is not finite. They are not
        moved forward, so nothing computed for them in this step enters the prefix cache. Then those
        that could not be verified.
        """
        if result.kv_is_finite is not None:
            failed = np.flatnonzero(~result.kv_is_finite)
            entries = np.searchsorted(layout.cu_seqlens_q, failed, side="right") - 1
            first_drafts = layout.cu_seqlens_q[1:] - layout.num_draft_tokens
            for entry in np.unique(entries[failed < first_drafts[entries]]).tolist():
                if batch.owners[entry].is_running:
                    self._table.reject(batch.owners[entry], ModelOutputError(NOT_FINITE_KV))
        for index, error in {**result.verdict.failures, **batch.failures}.items():
            sequence = batch.sampled[index].sequence
            if sequence.is_running:
                self._faults.fail(sequence, Fault.VERIFY, error)

    def _advance(self, entry: int, item: ScheduledSequence, verdict: _VerdictLists) -> _Decision:
        """Appends the decided tokens. K/V of rejected drafts is dropped by not counting it.

        If the row after some accepted drafts is not usable, these drafts are decided first, as they
        would be without drafting; then the sequence is rejected.
        """
        sequence = item.sequence
        if not item.is_sampled:
            sequence.num_computed_tokens += item.num_new_tokens
            return _Decision(entry, item, None, True)
        num_accepted, is_finite = verdict.num_accepted_tokens[entry], verdict.is_finite[entry]
        token_ids = verdict.output_token_ids[entry][: num_accepted + is_finite]
        if not token_ids:
            return _Decision(entry, item, None, False)
        is_stopped = not sequence.stop_token_ids.isdisjoint(token_ids)
        if is_stopped:
            token_ids = _up_to_stop(token_ids, sequence.stop_token_ids)
            num_accepted = min(num_accepted, len(token_ids))
        base_length = len(sequence.token_ids)
        # K/V of the last token is left to the next step: where it was a draft, its K/V may not
        # even be finite.
        sequence.num_computed_tokens += item.num_new_tokens + len(token_ids) - 1
        sequence.token_ids += token_ids
        matched_ngram_length, source = 0, None
        if item.draft_token_ids and not item.is_forced:
            # A hint may claim a longer match than there is text.
            matched_ngram_length = min(sequence.draft_buffer.match_length(base_length), base_length)
            source = sequence.draft_buffer.source
        remaining = sequence.remaining
        finish_reason = None
        if is_stopped:
            finish_reason = FinishReason.STOP
        elif remaining == 0:
            finish_reason = FinishReason.LENGTH
        if sequence.num_speculative_tokens:
            self._advance_drafting(sequence, 0 if is_stopped else remaining)
        logprobs: SequenceOf[TokenLogprob] = ()
        if verdict.logprobs:
            logprobs = verdict.logprobs.get(entry, [])[: len(token_ids)]
        decided = Decided(
            sequence.sequence_id,
            base_length,
            token_ids,
            len(item.draft_token_ids),
            num_accepted,
            sequence.num_wanted_draft_tokens,
            finish_reason,
            logprobs,
            matched_ngram_length,
            source,
            None if finish_reason is None else UndraftedSteps(**sequence.undrafted),
        )
        return _Decision(entry, item, decided, is_finite)

    def _emit(self, decision: _Decision, layout: BatchLayout, step_id: int) -> None:
        """Queues the events of one sequence."""
        _, item, decided, is_finite = decision
        sequence = item.sequence
        if sequence.hint_log is not None and (decided is not None or not item.is_sampled):
            self._emit_trace(decision, sequence.hint_log, layout, step_id)
        if decided is not None:
            self._table.emit(sequence, decided)
        if not is_finite and (decided is None or decided.finish_reason is None):
            self._table.reject(sequence, ModelOutputError(NOT_FINITE_LOGITS))

    def _advance_drafting(self, sequence: Sequence, remaining: int) -> None:
        """Moves the draft buffer to the new length, and requests a hint for it, if it is of use.

        Args:
            remaining: output tokens still allowed; 0: the sequence is over.
        """
        known = sequence.token_ids
        sequence.publications.append((len(known), self._now_s))
        record = sequence.hint_record
        record.settle(known)
        if not remaining:
            sequence.num_wanted_draft_tokens = 0
            return
        outcome = sequence.draft_buffer.advance(known, resumes=sequence.resumes_hints)
        if outcome is not None:
            self._hint_counts[outcome] += 1
        num_wanted = num_wanted_draft_tokens(
            num_speculative_tokens=sequence.num_speculative_tokens, remaining=remaining
        )
        if (
            num_wanted
            and sequence.draft_wait is not DraftWait.ALWAYS
            and is_gain_unlikely(
                num_useless_hints=record.num_useless_hints,
                num_declined=sequence.depth_record.num_declined,
            )
            and not self._probe_pace.count_probe()
        ):
            num_wanted = 0
        sequence.num_wanted_draft_tokens = num_wanted
        if num_wanted:
            if sequence.has_requested_hint:
                record.record_request()
            self._drafters.advance(sequence)

    def _emit_trace(
        self, decision: _Decision, hint_log: HintLog, layout: BatchLayout, step_id: int
    ) -> None:
        """Queues the step's trace of a traced sequence."""
        sequence, decided = decision.item.sequence, decision.decided
        step = trace_of(
            decision.entry,
            layout,
            step_id=step_id,
            known_token_ids=sequence.token_ids,
            num_accepted_tokens=0 if decided is None else decided.num_accepted_tokens,
            proposals=hint_log.drain(),
        )
        self._table.emit(sequence, StepTraced(sequence_id=sequence.sequence_id, step=step))


def _is_urgent(sequence: Sequence) -> bool:
    """Whether the next step may wait for the sequence's hint, and would probably gain by it."""
    return sequence.must_await_hint or (
        sequence.may_await_hint
        and not is_gain_unlikely(num_useless_hints=sequence.hint_record.num_useless_hints)
    )


def _up_to_stop(token_ids: list[int], stop_token_ids: frozenset[int]) -> list[int]:
    """The tokens up to and including the first stop token."""
    first = next(i for i, token_id in enumerate(token_ids) if token_id in stop_token_ids)
    return token_ids[: first + 1]
