"""The output of one choice that its client has not read yet.

Owns that output, merged into as few chunks as the limit on their bytes allows: a slow client costs
at most its own output, and gets no message that is too large for it. Knows no stop strings.
"""

import collections
from collections.abc import Sequence

from gateway.errors import UnreadError
from gateway.messages.response import Chunk, EncodedLogprob, EncodedStep, Step, Traced
from gateway.messages.sizes import FIELD_BYTES, MAX_CHUNK_BYTES, MAX_UNREAD_STEPS_BYTES, TOKEN_BYTES

# Charged at least for an unread trace, however small it is.
_MIN_TRACE_BYTES = 32

# At most, of a reported token beside its text: two tags with lengths, and a flag.
_REPORT_BYTES = 2 * FIELD_BYTES + 2


class UnreadOutput:
    """Owned by one `Generation`.

    Attributes:
        logprobs: of every decided token that is not read, if requested.
        prompt_logprobs: the prompt's that are not read.
    """

    def __init__(self, *, choice_index: int, token_ids: Sequence[int], prompt_length: int) -> None:
        """Begins after the tokens that the list holds already.

        Args:
            token_ids: the generation's own list, which grows.
        """
        self._choice_index = choice_index
        self._token_ids = token_ids
        self._prompt_length = prompt_length
        # How many of the tokens were read.
        self._num_read = len(token_ids)
        # In order: a step's trace comes before its tokens.
        self._shown: collections.deque[Step | EncodedStep] = collections.deque()
        self._num_trace_bytes = 0
        self.logprobs: list[EncodedLogprob] = []
        self.prompt_logprobs: list[EncodedLogprob] = []

    @property
    def is_empty(self) -> bool:
        """Whether everything that was shown is read."""
        return not self._shown

    def charge_trace(self, step: EncodedStep) -> None:
        """Counts a trace's bytes until it is read; before it is shown.

        Raises:
            UnreadError: the client has left too many bytes unread.
        """
        self._num_trace_bytes += _charged_bytes(step)
        if self._num_trace_bytes > MAX_UNREAD_STEPS_BYTES:
            raise UnreadError(
                f"over {MAX_UNREAD_STEPS_BYTES} bytes of traced steps were left unread"
            )

    def show(self, step: Step | EncodedStep) -> None:
        """Appends a step's tokens and text, or its trace."""
        self._shown.append(step)

    def read(self) -> Chunk | Traced | None:
        """Removes the next event; None if there is none.

        A chunk merges as many steps as it may hold. The logprobs of a long prompt come first, in
        chunks of their own. A trace comes alone, before its step's tokens.
        """
        if not self._shown:
            return None
        first = self._shown[0]
        if isinstance(first, EncodedStep):
            self._shown.popleft()
            self._num_trace_bytes -= _charged_bytes(first)
            return Traced(choice_index=self._choice_index, step=first)
        if len(self._shown) == 1 and not (self.prompt_logprobs or self.logprobs):
            self._shown.popleft()
            return self._read_step(first)
        return self._read_merged()

    def _read_step(self, step: Step) -> Chunk:
        """One step's chunk, for a client that keeps up; hot path."""
        first = self._num_read
        self._num_read += step.num_tokens
        return Chunk(
            choice_index=self._choice_index,
            offset=first - self._prompt_length,
            token_ids=self._token_ids[first : self._num_read],
            text=step.text,
            num_draft_tokens=step.num_draft_tokens,
            num_accepted_tokens=step.num_accepted_tokens,
            num_steps=1,
            steps=(step,),
        )

    def _read_merged(self) -> Chunk:
        room_bytes = MAX_CHUNK_BYTES
        prompt_logprobs: list[EncodedLogprob] = []
        for logprob in self.prompt_logprobs:
            room_bytes -= len(logprob) + FIELD_BYTES
            if room_bytes < 0 and prompt_logprobs:
                break
            prompt_logprobs.append(logprob)
        del self.prompt_logprobs[: len(prompt_logprobs)]
        steps: list[Step] = []
        num_tokens = 0
        while self._shown and not self.prompt_logprobs:
            step = self._shown[0]
            if isinstance(step, EncodedStep):
                break
            room_bytes -= self._max_bytes(step, num_tokens)
            if room_bytes < 0 and (steps or prompt_logprobs):
                break
            self._shown.popleft()
            steps.append(step)
            num_tokens += step.num_tokens
        first = self._num_read
        self._num_read += num_tokens
        chunk = Chunk(
            choice_index=self._choice_index,
            offset=first - self._prompt_length,
            token_ids=self._token_ids[first : self._num_read],
            text="".join([step.text for step in steps]),
            num_draft_tokens=sum([step.num_draft_tokens for step in steps]),
            num_accepted_tokens=sum([step.num_accepted_tokens for step in steps]),
            num_steps=len(steps),
            logprobs=tuple(self.logprobs[:num_tokens]),
            prompt_logprobs=tuple(prompt_logprobs),
            steps=steps,
        )
        del self.logprobs[:num_tokens]
        return chunk

    def _max_bytes(self, step: Step, first: int) -> int:
        """The most bytes that a step adds to a chunk; its logprobs begin at `first`."""
        text_bytes = len(step.text) if step.text.isascii() else len(step.text.encode())
        if step.token_texts:
            text_bytes = 2 * text_bytes + _REPORT_BYTES * len(step.token_texts)
        logprobs = self.logprobs[first : first + step.num_tokens]
        return (
            TOKEN_BYTES * step.num_tokens
            + text_bytes
            + sum(map(len, logprobs))
            + FIELD_BYTES * len(logprobs)
        )


def _charged_bytes(step: EncodedStep) -> int:
    return max(len(step), _MIN_TRACE_BYTES)
