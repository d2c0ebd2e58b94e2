"""The text of one output: which part of it is final, and where a stop string ends it.

Owns the way from tokens to what clients are shown, token by token. Knows no steps and no streams.
"""

import copy
from collections.abc import Sequence
from typing import NamedTuple

from gateway.text.detokenizer import Detokenizer
from gateway.text.output.channel_reader import ChannelReader
from gateway.text.output.output_reader import OutputReader
from gateway.text.output.parts import Read, Reading
from gateway.text.output.stop_strings import StopStrings

_SKIPPED_AT_ONCE = 4096


class Shown(NamedTuple):
    """What some tokens brought.

    Attributes:
        text: of the answer, that became final with them.
        num_tokens: how many of them belong to the output.
        token_texts: the whole text, in parts, one for each of these tokens, if they are reported:
            empty while a character, a tag or a possible stop string is incomplete.
        reads: what each of these tokens brought, if the output is told apart.
    """

    text: str
    num_tokens: int
    token_texts: Sequence[str] = ()
    reads: Sequence[Read] = ()


class OutputText:
    """Turns one output's tokens into text until a stop string is complete.

    Owned by one `Generation`. Without a detokenizer there is no text, and no stop string.
    """

    def __init__(
        self,
        detokenizer: Detokenizer | None,
        stop_sequences: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        reading: Reading | None = None,
        reports_tokens: bool = False,
    ) -> None:
        """Args:
        min_tokens: a stop string that one of the first so many tokens completes does not count.
        reading: what is told apart in the output; None: nothing.
        reports_tokens: whether the text of each token is told.
        """
        is_read = bool(stop_sequences or reading is not None or reports_tokens)
        assert detokenizer is not None or not is_read
        self._detokenizer = detokenizer
        # None: all text is the answer's.
        self._reader: OutputReader | ChannelReader | None = None
        if is_read:
            told = reading or Reading()
            kind = ChannelReader if told.has_channels else OutputReader
            self._reader = kind(told, StopStrings(stop_sequences))
        self._tells_apart = reading is not None
        self._reports_tokens = reports_tokens
        self._min_tokens = min_tokens
        self._num_tokens = 0
        # What is not reported yet.
        self._unreported = ""

    def copy(self) -> "OutputText":
        """An independent one in the same state: for another choice of the same request."""
        copied = copy.copy(self)
        copied._detokenizer = None if self._detokenizer is None else self._detokenizer.copy()
        copied._reader = None if self._reader is None else self._reader.copy()
        return copied

    def skip(self, token_ids: Sequence[int]) -> None:
        """Appends tokens whose text the client already has, many at a time.

        Text that they leave incomplete, or held back for a stop string, comes with later tokens.
        """
        if self._detokenizer is None:
            return
        # Those that stop strings do not count in come first.
        num_early = self._min_tokens
        for part in (token_ids[:num_early], token_ids[num_early:]):
            for first in range(0, len(part), _SKIPPED_AT_ONCE):
                group = part[first : first + _SKIPPED_AT_ONCE]
                self._num_tokens += len(group)
                text = self._detokenizer.feed(group)
                if self._reader is not None:
                    self._reader.feed(text, counts_stops=self._num_tokens > self._min_tokens)
                    self._report(text)
                    if self.stopped:
                        return

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete; then nothing may be fed."""
        return self._reader is not None and self._reader.stopped

    def feed(self, token_ids: Sequence[int]) -> Shown:
        """Appends the output's next tokens.

        Tokens after the one that completes a stop string do not belong to the output:
        `num_tokens` leaves them out.
        """
        if self._detokenizer is None:
            return Shown("", len(token_ids))
        if self._reader is None:
            return Shown(self._detokenizer.feed(token_ids), len(token_ids))
        reads: list[Read] = []
        token_texts: list[str] = []
        for token_id in token_ids:
            text = self._detokenizer.feed((token_id,))
            self._num_tokens += 1
            counts_stops = self._num_tokens > self._min_tokens
            reads.append(self._reader.feed(text, counts_stops=counts_stops))
            if self._reports_tokens:
                token_texts.append(self._report(text))
            if self.stopped:
                break
        return self._shown(reads, token_texts or ())

    def finish(self) -> Shown:
        """Ends an output: all that was held back. It has no token."""
        if self._detokenizer is None:
            return Shown("", 0)
        tail = self._detokenizer.finish()
        if self._reader is None:
            return Shown(tail, 0)
        read = self._reader.finish(tail)
        token_texts = (self._report(tail),) if self._reports_tokens else ()
        return self._shown([read], token_texts)._replace(num_tokens=0)

    def _shown(self, reads: Sequence[Read], token_texts: Sequence[str]) -> Shown:
        texts = [piece for read in reads for piece in read.pieces if isinstance(piece, str)]
        return Shown("".join(texts), len(reads), token_texts, reads if self._tells_apart else ())

    def _report(self, text: str) -> str:
        """What of the whole text is final, once the reader was fed the next text."""
        assert self._reader is not None, "it is read"
        self._unreported += text
        end = len(self._unreported) - self._reader.num_held
        reported, self._unreported = self._unreported[:end], self._unreported[end:]
        return reported
