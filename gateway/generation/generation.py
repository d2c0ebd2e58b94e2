"""One choice of one request: its tokens, its text and what it cost.

Sole owner of a choice's state. Knows no gRPC, no links, no metrics. Three parties use it, all on
the event loop:

    the coordinator appends what the verifier decided              append()
    the delivery makes text of it and shows it to the client       publish()
    the client's stream reads what was shown                       read()

`append` does as little as possible, so that a step's events are handled at once; text and counting
wait for `publish`, few clients at a time.

    token_ids    |---- prompt ----|-- given output --|-- read --|-- shown --|-- decided --|
                 0          prompt_length        (resume)            _num_shown          len
"""

import asyncio
import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from gateway.errors import VerifierError
from gateway.generation.unread_output import UnreadOutput
from gateway.generation.usage import MAX_MATCH_LENGTH, UsageCounter
from gateway.messages.request import AcceptedRequest
from gateway.messages.response import Chunk, EncodedLogprob, EncodedStep, Step, Traced
from gateway.messages.sizes import FIELD_BYTES, MAX_STEP_BYTES, NUMBER_BYTES
from gateway.messages.verifier import Decided, PromptScored
from gateway.text.output.output_text import OutputText, Shown
from gateway.text.output.parts import Read
from tandem.values import FinishReason, SamplingParams, UndraftedSteps, Usage

# At most, of one token's logprob or of one of its alternatives.
_LOGPROB_BYTES = 3 * NUMBER_BYTES + FIELD_BYTES + 3


class Resume(NamedTuple):
    """Another verifier went on with a choice; `at_s` is monotonic."""

    at_s: float
    reason: str
    verifier: str


class Generation:
    """The state of one choice.

    Invariants: `token_ids` holds no unverified draft and only grows (until a stop string cuts it);
    `_num_shown <= len(token_ids)`; `finish_reason` is set exactly once, after the last token was
    shown; nothing changes after it or after `error`.

    Attributes:
        token_ids: prompt and output, as decided.
        sequence_id: by which its verifier knows it; each verifier gets another one.
        num_cached_tokens: prompt tokens whose K/V the first verifier had that took it.
        num_losses: how often it lost its verifier, and not because that shut down.
        numerics_digest: of the lost verifier that made the last of its output; "" if that promised
            nothing, or there was none.
        resumes: when each verifier that went on with it took it, and why.
        admitted_at_s: when its first verifier admitted it to its batch, monotonic; None: not yet.
        finish_reason: why the output ended; None until all of it is shown.
        error: why there will be no more output.
        changed: set whenever there is something to read; shared by the choices of one request.
        served_at_s: when its tokens were shown last, by the delivery's clock; -inf: not yet.
    """

    def __init__(
        self,
        *,
        request: AcceptedRequest,
        sequence_id: str,
        choice_index: int,
        seed: int,
        output_text: OutputText,
        changed: asyncio.Event,
    ) -> None:
        """Begins with the request's prompt and the output that the client already has.

        Args:
            output_text: has been fed the given output.
        """
        self.request = request
        self.sequence_id = sequence_id
        self.choice_index = choice_index
        self.seed = seed
        self.changed = changed
        self.served_at_s = -math.inf
        self.token_ids: list[int] = [*request.prompt_token_ids, *request.output_token_ids]
        self.prompt_length = len(request.prompt_token_ids)
        self._num_given = len(self.token_ids)
        self.num_cached_tokens = 0
        self.num_losses = 0
        self.numerics_digest = ""
        self.resumes: list[Resume] = []
        self.admitted_at_s: float | None = None
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self._max_length = request.max_length
        self._vocab_size = request.vocab_size
        self._max_draft_tokens = request.num_speculative_tokens
        self._wants_logprobs = request.sampling.logprobs is not None
        self._output_text = output_text
        # In the order in which they came: a step's trace comes before its tokens.
        self._decided: list[Step | EncodedStep] = []
        self._decided_finish_reason: FinishReason | None = None
        self._num_shown = len(self.token_ids)
        self._unread = UnreadOutput(
            choice_index=choice_index, token_ids=self.token_ids, prompt_length=self.prompt_length
        )
        self._usage = UsageCounter()
        self._undrafted: UndraftedSteps | None = None
        # Prompt tokens whose logprobs are known, of those that this choice reports: only the first
        # choice does. A prompt's first token has none.
        self._num_scored = 0 if choice_index or request.sampling.prompt_logprobs is None else 1
        self._num_to_score = self._num_scored and self.prompt_length
        self._unread.prompt_logprobs += [b""] * self._num_scored

    @property
    def is_over(self) -> bool:
        """Whether no more output will be shown."""
        return self.finish_reason is not None or self.error is not None

    @property
    def num_generated(self) -> int:
        """Output tokens that were shown, without those that a resuming client brought."""
        return self._num_shown - self._num_given

    @property
    def has_unread(self) -> bool:
        """Whether something that was shown is not read."""
        return not self._unread.is_empty

    @property
    def has_output(self) -> bool:
        """Whether any token was decided here."""
        return len(self.token_ids) > self._num_given

    @property
    def goes_on(self) -> bool:
        """Whether it has output, decided here or brought along by its client."""
        return len(self.token_ids) > self.prompt_length

    @property
    def has_started(self) -> bool:
        """Whether a token was shown."""
        return self._usage.num_steps > 0

    @property
    def may_gather(self) -> bool:
        """Whether new tokens may wait for more of them. Traces are too large to gather."""
        return self._decided_finish_reason is None and not self.request.trace

    @property
    def is_urgent(self) -> bool:
        """Whether new tokens should wait only under load: until a stop string is found, the
        verifier goes on.
        """
        return bool(self.request.stop_sequences)

    @property
    def sampling(self) -> SamplingParams:
        """For the verifier: the request's, except that only the first choice scores the prompt."""
        sampling = self.request.sampling
        is_scored = self._num_scored == self.prompt_length > 1
        if sampling.prompt_logprobs is None or (self._num_scored and not is_scored):
            return sampling
        return dataclasses.replace(sampling, prompt_logprobs=None)

    def append_prompt_logprobs(self, scored: PromptScored) -> None:
        """Appends a prefill chunk's logprobs; those known already are ignored.

        Raises:
            VerifierError: some are missing or too many, or none were requested.
        """
        known = self._num_scored
        end = scored.base_length + len(scored.logprobs)
        if not 0 < scored.base_length <= known or end > self.prompt_length:
            raise VerifierError(
                f"the verifier scored [{scored.base_length}, {end}) of a prompt of "
                f"{self.prompt_length} tokens after {known}"
            )
        _check_sizes(scored.logprobs, self.request.sampling.prompt_logprobs or 0)
        if end > known:
            self._unread.prompt_logprobs += scored.logprobs[known - scored.base_length :]
            self._num_scored = end

    def append_trace(self, step: EncodedStep) -> None:
        """Appends the trace of a verifier step; its tokens, if any, are appended next.

        Raises:
            VerifierError: none was requested, or it is too large.
            UnreadError: the client has left too much of it unread.
        """
        if not self.request.trace or len(step) > MAX_STEP_BYTES:
            raise VerifierError(
                f"the verifier traced a step in {len(step)} bytes; the limit is "
                f"{MAX_STEP_BYTES if self.request.trace else 0}"
            )
        self._unread.charge_trace(step)
        self._decided.append(step)

    def append(self, decided: Decided) -> None:
        """Appends what a verifier step decided; hot path.

        Raises:
            VerifierError: it does not continue the sequence, or is impossible. Nothing was
                appended.
        """
        (
            _, base_length, token_ids, num_drafts, num_accepted, finish_reason, logprobs,
            matched_ngram_length, source, undrafted,
        ) = decided  # fmt: skip
        known = self.token_ids
        num_tokens = len(token_ids)
        if (
            base_length != len(known)
            or not num_accepted <= num_drafts <= self._max_draft_tokens
            or base_length + num_tokens > self._max_length
            or num_accepted > num_tokens
            or not num_tokens
            or max(token_ids) >= self._vocab_size
            # The last token that may come ends the output, and only a Close ends it as CANCELLED.
            or (base_length + num_tokens == self._max_length and not finish_reason)
            or finish_reason is FinishReason.CANCELLED
            or len(logprobs) != (num_tokens if self._wants_logprobs else 0)
            or self._num_scored != self._num_to_score
        ):
            raise self._impossible(decided)
        if logprobs:
            _check_sizes(logprobs, self.request.sampling.logprobs or 0)
            self._unread.logprobs += logprobs
        known += token_ids
        match_length = min(matched_ngram_length, MAX_MATCH_LENGTH)
        self._decided.append(Step(num_tokens, num_drafts, num_accepted, match_length, source))
        self._decided_finish_reason = finish_reason
        self._undrafted = undrafted

    def publish(self) -> Sequence[Step]:
        """Shows what was decided, and returns the steps that count.

        A stop string ends the output with the token that completes it. Tokens decided beyond it
        are dropped. Of the step that brought it, all drafts count as verified, and those within
        the output as accepted. Later steps count nowhere and their traces are dropped: usage
        states what was delivered, not how far the verifier had run ahead.
        """
        if self.is_over:
            return ()
        decided, self._decided = self._decided, []
        steps: list[Step] = []
        for step in decided:
            if isinstance(step, EncodedStep):
                self._unread.show(step)
                continue
            self._show(step, is_last=step is decided[-1])
            steps.append(step)
            if self._output_text.stopped:
                del self.token_ids[self._num_shown :]
                self._end(FinishReason.STOP)
                return steps
        if self._decided_finish_reason is not None:
            _add_tail(steps[-1], self._output_text.finish())
            is_stopped = self._output_text.stopped
            self._end(FinishReason.STOP if is_stopped else self._decided_finish_reason)
        elif decided:
            self.changed.set()
        return steps

    def fail(self, error: Exception) -> None:
        """Ends the output with an error; decided tokens must be published before, if possible."""
        if not self.is_over:
            self._drop_unshown()
            self.error = error
            self.changed.set()

    def cancel(self) -> None:
        """Ends the output: nobody wants it any more."""
        if not self.is_over:
            self._drop_unshown()
            self._end(FinishReason.CANCELLED)

    def read(self) -> Chunk | Traced | None:
        """The next event for the client; None if nothing more was shown. See `UnreadOutput`."""
        event = self._unread.read()
        if not self._unread.is_empty:
            self.changed.set()
        elif isinstance(event, Chunk) and self.finish_reason is not None:
            return dataclasses.replace(event, finish_reason=self.finish_reason)
        return event

    def usage(self) -> Usage:
        """What the shown output cost."""
        return self._usage.to_usage(
            prompt_tokens=self.prompt_length,
            output_tokens=self._num_shown - self.prompt_length,
            cached_tokens=self.num_cached_tokens,
            resumes=len(self.resumes),
            undrafted=self._undrafted,
        )

    def _show(self, step: Step, *, is_last: bool) -> None:
        token_ids = self.token_ids[self._num_shown : self._num_shown + step.num_tokens]
        if is_last and self._decided_finish_reason is FinishReason.STOP:
            # The verifier ends with the stop token: a token of the output, no part of its text.
            shown = self._output_text.feed(token_ids[:-1])
            if not self._output_text.stopped:
                texts = [*shown.token_texts, ""] if self.request.report_tokens else ()
                reads = [*shown.reads, Read(())] if self.request.reading is not None else ()
                shown = Shown(shown.text, len(token_ids), texts, reads)
        else:
            shown = self._output_text.feed(token_ids)
        step.num_tokens = shown.num_tokens
        step.num_accepted_tokens = min(step.num_accepted_tokens, shown.num_tokens)
        step.text = shown.text
        step.token_texts = shown.token_texts
        step.reads = shown.reads
        self._num_shown += step.num_tokens
        self._unread.show(step)
        self._usage.count(step)

    def _impossible(self, decided: Decided) -> VerifierError:
        if self._num_scored != self._num_to_score:
            return VerifierError("the verifier left out logprobs of the prompt")
        if decided.base_length != len(self.token_ids):
            return VerifierError(
                f"the verifier continued a sequence of {len(self.token_ids)} tokens "
                f"from {decided.base_length}"
            )
        return VerifierError(
            f"the verifier decided {len(decided.token_ids)} tokens after {decided.base_length} of "
            f"at most {self._max_length}, with ids up to {max(decided.token_ids, default=0)}, "
            f"{len(decided.logprobs)} logprobs, {decided.num_accepted_tokens} of "
            f"{decided.num_draft_tokens} drafts accepted and finish reason "
            f"{decided.finish_reason}, which is impossible"
        )

    def _drop_unshown(self) -> None:
        """Drops tokens that may lie after a stop string that was not searched for yet."""
        if self.request.stop_sequences:
            del self.token_ids[self._num_shown :]

    def _end(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self.changed.set()


def _add_tail(last: Step, tail: Shown) -> None:
    """Adds to the last step what was held back to the end."""
    last.text += tail.text
    last.reads = [*last.reads, *tail.reads]
    if last.token_texts:
        whole_tail = "".join(tail.token_texts)
        last.token_texts = [*last.token_texts[:-1], last.token_texts[-1] + whole_tail]


def _check_sizes(logprobs: Sequence[EncodedLogprob], num_alternatives: int) -> None:
    """Refuses logprobs with more alternatives than requested."""
    max_bytes = _LOGPROB_BYTES * (1 + num_alternatives)
    largest = max(map(len, logprobs), default=0)
    if largest > max_bytes:
        raise VerifierError(
            f"the verifier sent a logprob of {largest} bytes; with {num_alternatives} "
            f"alternatives the limit is {max_bytes}"
        )
