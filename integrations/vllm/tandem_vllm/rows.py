"""Which sequence each row of vLLM's batch holds.

vLLM gives a proposer no ids of requests, and reuses and reorders rows. So a row's sequence is the
one whose text it continues.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from tandem.client import DraftedSequence

Tokens = npt.NDArray[np.integer]

# Steps that a sequence may be absent from the batch until it counts as over. One that was preempted
# for longer is sent again.
_MAX_ABSENT_STEPS = 64


class Row:
    """A sequence and its text at its last step.

    Attributes:
        sequence: the drafter's.
        num_absent_steps: how many steps it has been absent for.
    """

    __slots__ = ("_buffer", "num_absent_steps", "num_tokens", "sequence")

    def __init__(self, sequence: DraftedSequence) -> None:
        """Begins without text."""
        self.sequence = sequence
        self.num_tokens = 0
        self.num_absent_steps = 0
        self._buffer = np.empty(1024, dtype=np.int64)

    @property
    def text(self) -> Tokens:
        """[num_tokens], until the next step."""
        return self._buffer[: self.num_tokens]

    def is_continued_by(self, text: Tokens) -> bool:
        return np.array_equal(text[: self.num_tokens], self.text)

    def continue_by(self, text: Tokens) -> None:
        """Takes over what a text that continues its own has more."""
        if len(text) > len(self._buffer):
            self._buffer = np.resize(self._buffer, 2 * len(text))
        self._buffer[self.num_tokens : len(text)] = text[self.num_tokens :]
        self.num_tokens = len(text)


class Rows:
    """The sequences of all rows."""

    def __init__(self) -> None:
        """Begins with none."""
        self._rows: dict[int, Row] = {}
        self._absent: list[Row] = []

    def step(
        self, texts: Mapping[int, Tokens], begin: Callable[[int], DraftedSequence]
    ) -> tuple[Mapping[int, Row], list[Row]]:
        """The sequences of the batch, and those that are over.

        Args:
            texts: by row; all that have sampled in this step.
            begin: makes the sequence of a row whose text continues none.
        """
        before, self._rows = self._rows, {}
        for index, text in texts.items():
            row = before.get(index)
            if row is not None and row.is_continued_by(text):
                self._rows[index] = before.pop(index)
        # A text may continue one that is a beginning of its own former one.
        others = sorted(
            [*before.values(), *self._absent], key=lambda row: row.num_tokens, reverse=True
        )
        for index, text in texts.items():
            if index in self._rows:
                continue
            row = next((each for each in others if each.is_continued_by(text)), None)
            if row is None:
                row = Row(begin(index))
            else:
                others.remove(row)
            self._rows[index] = row
        for index, row in self._rows.items():
            row.continue_by(texts[index])
            row.num_absent_steps = 0
        for row in others:
            row.num_absent_steps += 1
        self._absent = [row for row in others if row.num_absent_steps <= _MAX_ABSENT_STEPS]
        return self._rows, [row for row in others if row.num_absent_steps > _MAX_ABSENT_STEPS]
