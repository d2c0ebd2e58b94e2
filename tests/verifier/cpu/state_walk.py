"""Random steps of a decoder with recurrent states: prompts in chunks, drafts of which any number is
accepted, states that are kept and begun with again.
"""

import random
from collections.abc import Iterator

from tests.verifier.chunks import Chunk
from verifier.batch.batch_layout import StateUse

NUM_SEQUENCES, NUM_KEPT = 3, 3
NUM_SLOTS = NUM_SEQUENCES + NUM_KEPT


class Walk:
    """Sequences of one text, each in its slot and its blocks; further slots keep states.

    Attributes:
        steps: chunks, each with the number of its last rows whose logits are the text's.
    """

    def __init__(
        self, text: list[int], draw: random.Random, *, vocab_size: int, max_num_tokens: int,
        max_drafts: int, num_blocks: int,
    ) -> None:  # fmt: skip
        self._text = text
        self._draw = draw
        self._vocab_size = vocab_size
        self._max_num_tokens = max_num_tokens
        self._max_drafts = max_drafts
        per_sequence = num_blocks // NUM_SEQUENCES
        self._tables = [
            [*range(i * per_sequence, (i + 1) * per_sequence)] for i in range(NUM_SEQUENCES)
        ]
        self._positions = [0] * NUM_SEQUENCES
        # After how many tokens their slots have states: accepted drafts follow.
        self._lengths = [0] * NUM_SEQUENCES
        # Of each slot that keeps states: after how many tokens.
        self._kept: dict[int, int] = {}

    def steps(self, count: int) -> Iterator[list[tuple[Chunk, int]]]:
        for _ in range(count):
            room = self._max_num_tokens
            chosen = self._draw.sample(range(NUM_SEQUENCES), self._draw.randint(1, NUM_SEQUENCES))
            read: set[int] = set()
            written: set[int] = set()
            step = []
            for sequence in chosen:
                if room > 0:
                    step.append(self._chunk(sequence, room, read, written))
                    room -= len(step[-1][0].token_ids)
            yield step

    def _chunk(
        self, sequence: int, room: int, read: set[int], written: set[int]
    ) -> tuple[Chunk, int]:
        draw, text = self._draw, self._text
        source = -1
        if draw.random() < 0.1 or self._positions[sequence] > len(text) - self._max_num_tokens:
            # Anew, or where states were kept whose tokens are this sequence's, too.
            usable = [slot for slot, length in self._kept.items()
                      if slot not in written and length <= self._positions[sequence]]  # fmt: skip
            source = draw.choice([-1, *usable])
            self._positions[sequence] = self._lengths[sequence] = self._kept.get(source, 0)
            read.add(source)
        start = self._positions[sequence]
        num_certain = min(room, draw.choice([1, 1, draw.randint(2, 9), draw.randint(10, 90)]))
        num_drafts = min(room - num_certain, draw.randint(0, self._max_drafts))
        num_right = draw.randint(0, num_drafts)
        end = start + num_certain
        drafts = [
            token if i < num_right else (token + 1) % self._vocab_size
            for i, token in enumerate(text[end : end + num_drafts])
        ]
        saves: list[tuple[int, int]] = []
        free = [slot for slot in range(NUM_SEQUENCES, NUM_SLOTS) if slot not in read | written]
        passed = range(self._lengths[sequence] + 1, end + 1)
        if free and len(passed) > 1:
            lengths = sorted(draw.sample(passed, min(len(free), draw.choice([0, 1, 2]))))
            saves = list(zip(lengths, free, strict=False))
        written.update(slot for _, slot in saves)
        self._kept.update({slot: length for length, slot in saves})
        self._lengths[sequence] = end
        # More may be accepted than was asked for at once.
        self._positions[sequence] = end + draw.randint(0, num_right)
        chunk = Chunk(
            token_ids=text[start:end] + drafts,
            start=start,
            block_table=self._tables[sequence],
            num_rows=num_drafts + 1,
            state=StateUse(sequence, source, tuple(saves)),
        )
        return chunk, num_right + 1
