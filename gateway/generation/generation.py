"""One choice of one request: its tokens, its text and what it cost.

Sole owner of a choice's state. Knows no gRPC, no links, no metrics. Three parties touch it, all
on the event loop:

    the coordinator appends what the verifier decided        decide()
    the delivery makes text of it and shows it to the client publish()
    the client's stream takes what was shown                 take()

`decide` is on the path to the next hint and does as little as can be; text and counting wait for
`publish`, after the hints. What the client has not taken yet is merged when it is taken, into as
few chunks as the bound on their bytes lets: a slow client costs at most its own output, and hears
no message that is too large for it.

    token_ids    |---- prompt ----|-- given output --|-- taken --|-- shown --|-- decided --|
                 0           prompt_length        (resume)    _taken      _shown         len
"""

import asyncio
import collections
import dataclasses
from collections.abc import Sequence

from gateway.errors import OverloadedError, VerifierError
from gateway.messages.request import AcceptedRequest, SamplingParams
from gateway.messages.response import (
    Chunk,
    EncodedLogprob,
    EncodedStep,
    FinishReason,
    MatchAcceptance,
    Source,
    Traced,
    Usage,
)
from gateway.messages.sizes import (
    FIELD_BYTES,
    MAX_CHUNK_BYTES,
    MAX_STEP_BYTES,
    MAX_UNREAD_STEPS_BYTES,
    NUMBER_BYTES,
    TOKEN_BYTES,
)
from gateway.messages.verifier import Decided, PromptScored
from gateway.text.output_text import OutputText

# A match that reaches further back is counted as one that reaches so far.
MAX_MATCH_LENGTH = 64

# What a traced step that waits costs at least, whatever the verifier says in it.
_MIN_STEP_BYTES = 32

# At most, of a token's logprob or of one of those beside it; and in a chunk, what is around it.
_LOGPROB_BYTES = 3 * NUMBER_BYTES + FIELD_BYTES + 3


@dataclasses.dataclass(slots=True)
class Step:
    """What one verifier step gave one sequence.

    After `publish`, the figures are those that count: without the tokens behind a stop string.

    Attributes:
        matched_ngram_length: how far back the drafts' match reached, in tokens, at most
            `MAX_MATCH_LENGTH`.
        source: where the drafts were copied from; the wire's number, known or not.
        text: what became certain with it.
    """

    num_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    matched_ngram_length: int = 0
    source: int = 0
    text: str = ""


class Generation:
    """The state of one choice.

    Invariants: `token_ids` holds no unverified draft and only grows (until a stop string cuts it);
    `_taken <= _shown <= len(token_ids)`; `finish_reason` is set exactly once, after the last token
    was shown; nothing changes after it or after `error`.

    Attributes:
        token_ids: prompt and output, as decided; drafters are sent slices of it.
        num_cached_tokens: prompt tokens whose K/V the verifier had.
        finish_reason: why the output ended; UNFINISHED until all of it is shown.
        error: why there will be no more output.
        changed: set whenever there is something to take; shared by the choices of one request.
    """

    __slots__ = (
        "_accepted_per_position",
        "_by_match_length",
        "_decided",
        "_decided_finish_reason",
        "_logprobs",
        "_max_draft_tokens",
        "_max_length",
        "_num_accepted_tokens",
        "_num_draft_tokens",
        "_num_drafts",
        "_num_pool_drafts",
        "_num_scored",
        "_num_sequence_drafts",
        "_num_steps",
        "_num_to_score",
        "_num_unread_step_bytes",
        "_output_text",
        "_prompt_logprobs",
        "_shown",
        "_taken",
        "_untaken",
        "_vocab_size",
        "_wants_logprobs",
        "changed",
        "choice_index",
        "error",
        "finish_reason",
        "num_cached_tokens",
        "prompt_length",
        "request",
        "seed",
        "sequence_id",
        "token_ids",
    )

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
            output_text: has been fed the given output, so that text goes on from there.
        """
        self.request = request
        self.sequence_id = sequence_id
        self.choice_index = choice_index
        self.seed = seed
        self.changed = changed
        self.token_ids: list[int] = [*request.prompt_token_ids, *request.output_token_ids]
        self.prompt_length = len(request.prompt_token_ids)
        self._max_length = self.prompt_length + request.max_new_tokens
        self._vocab_size = request.vocab_size
        self._max_draft_tokens = request.num_speculative_tokens
        self._wants_logprobs = request.sampling.logprobs is not None
        self.num_cached_tokens = 0
        self.finish_reason = FinishReason.UNFINISHED
        self.error: Exception | None = None
        self._output_text = output_text
        # In the order in which they came: a traced step is before the tokens that it gave.
        self._decided: list[Step | EncodedStep] = []
        self._decided_finish_reason = FinishReason.UNFINISHED
        self._shown = self._taken = len(self.token_ids)
        # What was shown: steps, and at the end text that had been held back.
        self._untaken: collections.deque[Step | EncodedStep] = collections.deque()
        # Of the traced steps that are not taken.
        self._num_unread_step_bytes = 0
        # Of every decided token that is not taken, if the request asked for them; else empty.
        self._logprobs: list[EncodedLogprob] = []
        # How many of the prompt's tokens are scored, if this choice's are to be: the first follows
        # nothing. And the logprobs that are not taken.
        self._num_scored = 0 if choice_index or request.sampling.prompt_logprobs is None else 1
        self._num_to_score = self._num_scored and self.prompt_length
        self._prompt_logprobs: list[EncodedLogprob] = [b""] * self._num_scored
        self._num_steps = 0
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0
        self._accepted_per_position: list[int] = []
        # By match length: drafts, draft tokens, accepted ones.
        self._by_match_length: dict[int, list[int]] = {}
        self._num_sequence_drafts = 0
        self._num_pool_drafts = 0

    @property
    def is_over(self) -> bool:
        """Whether everything there will be can be taken now."""
        return self.finish_reason is not FinishReason.UNFINISHED or self.error is not None

    @property
    def has_more(self) -> bool:
        """Whether something that was shown is not taken: another chunk follows at once."""
        return bool(self._untaken)

    @property
    def sampling(self) -> SamplingParams:
        """What a verifier is asked for: the request's, but the prompt is scored once, for the first
        choice.
        """
        sampling = self.request.sampling
        is_scored = self._num_scored == self.prompt_length > 1
        if sampling.prompt_logprobs is None or (self._num_scored and not is_scored):
            return sampling
        return dataclasses.replace(sampling, prompt_logprobs=None)

    @property
    def has_started(self) -> bool:
        """Whether a token was shown."""
        return self._num_steps > 0

    def score_prompt(self, scored: PromptScored) -> None:
        """Appends a prefill chunk's logprobs; those known already are ignored.

        Raises:
            VerifierError: some are missing or too many, or none were asked for.
        """
        known = self._num_scored
        end = scored.base_length + len(scored.logprobs)
        if not 0 < scored.base_length <= known or end > self.prompt_length:
            raise VerifierError(
                f"the verifier scored [{scored.base_length}, {end}) of a prompt of "
                f"{self.prompt_length} tokens after {known}"
            )
        self._check_sizes(scored.logprobs, self.request.sampling.prompt_logprobs or 0)
        if end > known:
            self._prompt_logprobs += scored.logprobs[known - scored.base_length :]
            self._num_scored = end

    def trace(self, step: EncodedStep) -> None:
        """Appends what a verifier step did; its tokens are decided next, if it gave any.

        Raises:
            VerifierError: nobody asked for it, or it is too large.
            OverloadedError: the client has left too much of it unread.
        """
        if not self.request.trace or len(step) > MAX_STEP_BYTES:
            raise VerifierError(
                f"the verifier told of a step in {len(step)} bytes, of at most "
                f"{MAX_STEP_BYTES if self.request.trace else 0}"
            )
        self._num_unread_step_bytes += _kept_bytes(step)
        if self._num_unread_step_bytes > MAX_UNREAD_STEPS_BYTES:
            raise OverloadedError(
                f"over {MAX_UNREAD_STEPS_BYTES} bytes of traced steps were left unread"
            )
        self._decided.append(step)

    def decide(self, decided: Decided) -> None:
        """Appends what a verifier step decided; hot path.

        Raises:
            VerifierError: it does not continue the sequence, or cannot be. Nothing was appended.
        """
        (
            _, base_length, token_ids, num_drafts, num_accepted, _, finish_reason, logprobs,
            matched_ngram_length, source,
        ) = decided  # fmt: skip
        known = self.token_ids
        num_tokens = len(token_ids)
        if (
            base_length != len(known)
            or not num_accepted <= num_drafts <= self._max_draft_tokens
            or base_length + num_tokens > self._max_length
            or num_accepted > num_tokens
            or (num_tokens and max(token_ids) >= self._vocab_size)
            or len(logprobs) != (num_tokens if self._wants_logprobs else 0)
            or self._num_scored != self._num_to_score
        ):
            raise self._impossible(decided)
        if logprobs:
            self._check_sizes(logprobs, self.request.sampling.logprobs or 0)
            self._logprobs += logprobs
        if num_tokens:
            known += token_ids
            match_length = min(matched_ngram_length, MAX_MATCH_LENGTH)
            self._decided.append(Step(num_tokens, num_drafts, num_accepted, match_length, source))
        self._decided_finish_reason = finish_reason

    def publish(self) -> Sequence[Step]:
        """Shows what was decided, and returns the steps that it counts.

        A stop string ends the output with the token that completes it: tokens decided beyond are
        dropped; of the step that brought it, the drafts count as scheduled, and as accepted those
        that are part of the output; later steps count nowhere. So usage tells what was delivered,
        and not that the verifier had already run ahead. Later steps are not told of, either.
        """
        if self.is_over:
            return ()
        decided, self._decided = self._decided, []
        steps: list[Step] = []
        for each in decided:
            if isinstance(each, EncodedStep):
                self._untaken.append(each)
                continue
            self._show(each, is_last=each is decided[-1])
            steps.append(each)
            if self._output_text.stopped:
                del self.token_ids[self._shown :]
                self._end(FinishReason.STOP)
                return steps
        if self._decided_finish_reason is not FinishReason.UNFINISHED:
            tail = self._output_text.finish()
            if tail:
                self._untaken.append(Step(0, 0, 0, text=tail))
            self._end(self._decided_finish_reason)
        elif decided:
            self.changed.set()
        return steps

    def fail(self, error: Exception) -> None:
        """There will be no more output. What was decided must have been published before, unless
        that failed.
        """
        if not self.is_over:
            self._drop_unshown()
            self.error = error
            self.changed.set()

    def cancel(self) -> None:
        """Nobody wants the output any more."""
        if not self.is_over:
            self._drop_unshown()
            self._end(FinishReason.CANCELLED)

    def take(self) -> Chunk | Traced | None:
        """What was shown since the last chunk, as one; None if nothing was.

        As much as a chunk may hold: what is left follows in the next. A long prompt's logprobs
        come first, in chunks of their own. A traced step comes alone, before its tokens.
        """
        if not self._untaken:
            return None
        first = self._untaken[0]
        if isinstance(first, EncodedStep):
            return self._take_traced(first)
        if len(self._untaken) == 1 and not (self._prompt_logprobs or self._logprobs):
            self._untaken.popleft()
            return self._take_step(first)
        room = MAX_CHUNK_BYTES
        prompt_logprobs: list[EncodedLogprob] = []
        for logprob in self._prompt_logprobs:
            room -= len(logprob) + FIELD_BYTES
            if room < 0 and prompt_logprobs:
                break
            prompt_logprobs.append(logprob)
        del self._prompt_logprobs[: len(prompt_logprobs)]
        taken: list[Step] = []
        num_tokens = 0
        while self._untaken and not self._prompt_logprobs:
            step = self._untaken[0]
            if isinstance(step, EncodedStep):
                break
            room -= self._num_bytes(step, num_tokens)
            if room < 0 and (taken or prompt_logprobs):
                break
            self._untaken.popleft()
            taken.append(step)
            num_tokens += step.num_tokens
        chunk = Chunk(
            choice_index=self.choice_index,
            offset=self._taken - self.prompt_length,
            token_ids=self.token_ids[self._taken : self._taken + num_tokens],
            text="".join([shown.text for shown in taken]),
            num_draft_tokens=sum([shown.num_draft_tokens for shown in taken]),
            num_accepted_tokens=sum([shown.num_accepted_tokens for shown in taken]),
            num_steps=sum([shown.num_tokens > 0 for shown in taken]),
            logprobs=tuple(self._logprobs[:num_tokens]),
            prompt_logprobs=tuple(prompt_logprobs),
        )
        self._taken += num_tokens
        del self._logprobs[:num_tokens]
        if self._untaken:
            self.changed.set()
        return chunk

    def _take_step(self, step: Step) -> Chunk:
        """What a client that keeps up takes each time; hot path."""
        first = self._taken
        self._taken += step.num_tokens
        return Chunk(
            choice_index=self.choice_index,
            offset=first - self.prompt_length,
            token_ids=self.token_ids[first : self._taken],
            text=step.text,
            num_draft_tokens=step.num_draft_tokens,
            num_accepted_tokens=step.num_accepted_tokens,
            num_steps=1 if step.num_tokens else 0,
        )

    def _take_traced(self, step: EncodedStep) -> Traced:
        self._untaken.popleft()
        self._num_unread_step_bytes -= _kept_bytes(step)
        if self._untaken:
            self.changed.set()
        return Traced(choice_index=self.choice_index, step=step)

    def usage(self) -> Usage:
        """What the shown output cost."""
        return Usage(
            prompt_tokens=self.prompt_length,
            output_tokens=self._shown - self.prompt_length,
            cached_tokens=self.num_cached_tokens,
            num_steps=self._num_steps,
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
            accepted_per_position=tuple(self._accepted_per_position),
            resumes=0,
            by_match_length=tuple(
                MatchAcceptance(
                    matched_ngram_length=length,
                    num_drafts=num_drafts,
                    num_draft_tokens=num_draft_tokens,
                    num_accepted_tokens=num_accepted_tokens,
                )
                for length, (num_drafts, num_draft_tokens, num_accepted_tokens) in sorted(
                    self._by_match_length.items()
                )
            ),
            num_sequence_drafts=self._num_sequence_drafts,
            num_pool_drafts=self._num_pool_drafts,
        )

    def _show(self, step: Step, *, is_last: bool) -> None:
        token_ids = self.token_ids[self._shown : self._shown + step.num_tokens]
        if is_last and self._decided_finish_reason is FinishReason.STOP:
            # The verifier ends with the stop token: a token of the output, no part of its text.
            shown = self._output_text.feed(token_ids[:-1])
            if not self._output_text.stopped:
                shown = shown._replace(num_tokens=len(token_ids))
        else:
            shown = self._output_text.feed(token_ids)
        step.num_tokens = shown.num_tokens
        step.num_accepted_tokens = min(step.num_accepted_tokens, shown.num_tokens)
        self._shown += step.num_tokens
        step.text = shown.text
        self._untaken.append(step)
        self._count(step)

    def _count(self, step: Step) -> None:
        self._num_steps += 1
        if not step.num_draft_tokens:
            return
        self._num_drafts += 1
        self._num_draft_tokens += step.num_draft_tokens
        self._num_accepted_tokens += step.num_accepted_tokens
        missing = step.num_draft_tokens - len(self._accepted_per_position)
        if missing > 0:
            self._accepted_per_position += [0] * missing
        for position in range(step.num_accepted_tokens):
            self._accepted_per_position[position] += 1
        counts = self._by_match_length.setdefault(step.matched_ngram_length, [0, 0, 0])
        counts[0] += 1
        counts[1] += step.num_draft_tokens
        counts[2] += step.num_accepted_tokens
        self._num_sequence_drafts += step.source == Source.SEQUENCE
        self._num_pool_drafts += step.source == Source.POOL

    def _num_bytes(self, shown: Step, first: int) -> int:
        """At most as many bytes a step adds to a chunk; its logprobs begin at `first`."""
        num_bytes = TOKEN_BYTES * shown.num_tokens + len(shown.text)
        if not shown.text.isascii():
            num_bytes = TOKEN_BYTES * shown.num_tokens + len(shown.text.encode())
        if self._wants_logprobs:
            for logprob in self._logprobs[first : first + shown.num_tokens]:
                num_bytes += len(logprob) + FIELD_BYTES
        return num_bytes

    def _check_sizes(self, logprobs: Sequence[EncodedLogprob], num_tops: int) -> None:
        """Refuses what holds more than was asked for."""
        most = _LOGPROB_BYTES * (1 + num_tops)
        largest = max(map(len, logprobs), default=0)
        if largest > most:
            raise VerifierError(
                f"the verifier gave a logprob of {largest} bytes, and of {num_tops} tokens beside "
                f"it they are at most {most}"
            )

    def _impossible(self, decided: Decided) -> VerifierError:
        """Why a decision cannot be."""
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
            f"{len(decided.logprobs)} logprobs and {decided.num_accepted_tokens} of "
            f"{decided.num_draft_tokens} drafts accepted, which cannot be"
        )

    def _drop_unshown(self) -> None:
        """Where there may be a stop string, what was not shown may lie behind that."""
        if self.request.stop_sequences:
            del self.token_ids[self._shown :]

    def _end(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self.changed.set()


def _kept_bytes(step: EncodedStep) -> int:
    """What a traced step counts for while it is not taken."""
    return max(len(step), _MIN_STEP_BYTES)
