"""Hands batches of texts to the kernel, in parts to several threads when there is enough to do.

Knows what a call costs and how long one may take. Does not know sequences, streams or requests
(`drafting.py`).
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drafter.indexed_text import HASH_BASE, IndexedText
from drafter.jit import warm_up
from drafter.ngram_params import Algorithm, NgramParams, Tie
from drafter.proposal_kernel import answer_texts

BUDGET = 16_384
"""How much one call may do, in n-grams entered: about 0.3 ms."""

PARALLEL_TEXTS = 512
"""From how many texts on a call is shared by threads: waking them takes as long as 200 texts do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What became of each text of a call."""

    statuses: npt.NDArray[np.int64]
    """`DONE`, `BEHIND` or `MUST_GROW + index`, see `proposal_kernel.py`."""
    reaches: npt.NDArray[np.int64]
    draft_starts: npt.NDArray[np.int64]
    draft_lengths: npt.NDArray[np.int64]
    drafts: npt.NDArray[np.uint32]
    """The draft of text i is `drafts[draft_starts[i] : draft_starts[i] + draft_lengths[i]]`."""


class Answerer:
    """Runs the kernel.

    Used by one thread at a time, which waits for the others that it wakes: the texts belong to
    nobody else meanwhile.
    """

    def __init__(self, *, num_threads: int = 1) -> None:
        """Makes it ready to be warmed up.

        Args:
            num_threads: how many threads share a large batch, the caller's own included.
        """
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(max(num_threads - 1, 1), "drafter-kernel")

    def warm_up(self) -> None:
        """Compiles the kernels, or loads them from disk. May take seconds; called off the loop."""
        texts = []
        for algorithm in Algorithm:
            params = NgramParams(min_ngram=1, algorithm=algorithm, tie=Tie.LONGEST, chained=True)
            text = IndexedText(params=params, max_tokens=1 << 10)
            text.append(np.array([1, 2, 1, *range(100), 1], dtype=np.uint32))
            texts.append(text)
        warm_up(lambda: self.answer(texts, [3, 3]))
        warm_up(lambda: texts[0].grow_table(0))

    def answer(self, texts: Sequence[IndexedText], most_tokens: Sequence[int]) -> Answers:
        """Brings indexes up to date and drafts, as far as one call's budget goes.

        Args:
            texts: each once.
            most_tokens: how long each draft may be; 0: the index only.
        """
        num_texts = len(texts)
        headers = np.array([text.address for text in texts], dtype=np.int64)
        wanted = np.array(most_tokens, dtype=np.int64)
        ends = np.cumsum(wanted)
        answers = Answers(
            statuses=np.empty(num_texts, dtype=np.int64),
            reaches=np.empty(num_texts, dtype=np.int64),
            draft_starts=ends - wanted,
            draft_lengths=np.empty(num_texts, dtype=np.int64),
            drafts=np.empty(int(ends[-1]) if num_texts else 0, dtype=np.uint32),
        )

        def answer_part(part: slice) -> None:
            answer_texts(
                headers[part],
                wanted[part],
                HASH_BASE,
                BUDGET,
                answers.draft_starts[part],
                answers.drafts,
                answers.draft_lengths[part],
                answers.reaches[part],
                answers.statuses[part],
            )

        if self._num_threads == 1 or num_texts < PARALLEL_TEXTS:
            answer_part(slice(num_texts))
            return answers
        size = -(-num_texts // self._num_threads)
        parts = [slice(first, first + size) for first in range(0, num_texts, size)]
        others = [self._threads.submit(answer_part, part) for part in parts[1:]]
        answer_part(parts[0])
        for other in others:
            other.result()
        return answers
