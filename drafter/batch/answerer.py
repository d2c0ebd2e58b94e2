"""Hands batches of texts to the kernel, in parts to several threads when there is enough to do.

Knows what a call costs and how long one may take. Does not know sequences, streams or requests
(`drafting.py`).
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drafter.kernels.memory import address_of
from drafter.ngram.draft import SCANNED_DRAFT_WORDS, scan_draft, scanned_draft
from drafter.ngram.index import DONE
from drafter.ngram.params import Algorithm, NgramParams, Tie
from drafter.ngram.propose import SCANNED_PER_ENTRY, answer_texts
from drafter.ngram.text import HASH_BASE, IndexedText

BUDGET = 8_192
"""How much one call may do, in n-grams entered: about 0.3 ms."""

PARALLEL_TEXTS = 512
"""From how many texts on a call is shared by threads: waking them takes as long as 200 texts do."""


MOST_LACKING = 192
"""How many of the last tokens may be missing in an index when a draft is asked for: they are looked
through, and entered when the answer is on its way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What became of each text of a call."""

    statuses: npt.NDArray[np.int64]
    """`DONE`, `BEHIND`, `MUST_SCAN` or `MUST_GROW + index`, see `ngram_index.py`."""
    lengths: npt.NDArray[np.int64]
    """How many tokens the text had."""
    reaches: npt.NDArray[np.int64]
    draft_starts: npt.NDArray[np.int64]
    draft_lengths: npt.NDArray[np.int64]
    drafts: npt.NDArray[np.uint32]
    """The draft of text i is `drafts[draft_starts[i] : draft_starts[i] + draft_lengths[i]]`."""


class ScannedDraft:
    """A draft that scans of a text find, piece by piece; see `draft_kernel.scan_draft`."""

    __slots__ = ("draft_start", "progress", "wanted")

    def __init__(self, *, wanted: int, draft_start: int) -> None:
        """Nothing is found yet.

        Args:
            wanted: how long the draft may be.
            draft_start: where it goes.
        """
        self.wanted = wanted
        self.draft_start = draft_start
        self.progress = np.zeros(SCANNED_DRAFT_WORDS, dtype=np.int64)


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
        self.answer(texts, [3, 3])
        texts[0].grow_table(0)
        scan = ScannedDraft(wanted=3, draft_start=0)
        drafts = np.empty(3, dtype=np.uint32)
        self.go_on_with_scan(texts[-1].address, scan, drafts)

    def answer(
        self, texts: Sequence[IndexedText], most_tokens: Sequence[int], *, most_lacking: int = 0
    ) -> Answers:
        """Brings indexes up to date and drafts, see `answer_headers`.

        Args:
            texts: each once.
            most_tokens: how long each draft may be; 0: the index only.
            most_lacking: see `answer_texts`.
        """
        wanted = np.array(most_tokens, dtype=np.int64)
        ends = np.cumsum(wanted)
        return self.answer_headers(
            np.array([text.address for text in texts], dtype=np.int64),
            wanted,
            ends - wanted,
            np.empty(int(ends[-1]) if len(texts) else 0, dtype=np.uint32),
            most_lacking=most_lacking,
        )

    def answer_headers(
        self,
        headers: npt.NDArray[np.int64],
        wanted: npt.NDArray[np.int64],
        draft_starts: npt.NDArray[np.int64],
        drafts: npt.NDArray[np.uint32],
        *,
        most_lacking: int,
    ) -> Answers:
        """Brings indexes up to date and drafts, as far as one call's budget goes.

        Args:
            headers: addresses of texts, each once, [num_texts].
            wanted: how long each draft may be; 0: the index only, [num_texts].
            draft_starts: where in `drafts` each draft goes, [num_texts].
            drafts: takes the drafts.
            most_lacking: see `answer_texts`.
        """
        num_texts = len(headers)
        found = np.empty((4, num_texts), dtype=np.int64)
        draft_lengths, reaches, lengths, statuses = found

        def answer_part(part: slice) -> None:
            answer_texts(
                headers[part],
                wanted[part],
                HASH_BASE,
                BUDGET,
                most_lacking,
                draft_starts[part],
                drafts,
                draft_lengths[part],
                reaches[part],
                lengths[part],
                statuses[part],
            )

        if self._num_threads == 1 or num_texts < PARALLEL_TEXTS:
            answer_part(slice(num_texts))
        else:
            size = -(-num_texts // self._num_threads)
            parts = [slice(first, first + size) for first in range(0, num_texts, size)]
            others = [self._threads.submit(answer_part, part) for part in parts[1:]]
            answer_part(parts[0])
            for other in others:
                other.result()
        return Answers(
            statuses=statuses,
            lengths=lengths,
            reaches=reaches,
            draft_starts=draft_starts,
            draft_lengths=draft_lengths,
            drafts=drafts,
        )

    def go_on_with_scan(
        self, header: int, scan: ScannedDraft, drafts: npt.NDArray[np.uint32]
    ) -> Answers | None:
        """Goes on to answer a text that `MUST_SCAN`, as far as one call's budget goes.

        Args:
            header: address of the text.
            scan: how far that has come.
            drafts: takes the draft, which is to be kept from call to call.

        Returns:
            The answer; None: call again.
        """
        progress = address_of(scan.progress)
        scan_draft(
            header,
            scan.wanted,
            address_of(drafts) + drafts.itemsize * scan.draft_start,
            progress,
            BUDGET * SCANNED_PER_ENTRY,
        )
        is_done, num_known, num_tokens, reach = scanned_draft(progress)
        if not is_done:
            return None
        numbers = np.array(
            [[DONE], [num_known], [reach], [scan.draft_start], [num_tokens]],
            dtype=np.int64,
        )
        statuses, lengths, reaches, draft_starts, draft_lengths = numbers
        return Answers(
            statuses=statuses,
            lengths=lengths,
            reaches=reaches,
            draft_starts=draft_starts,
            draft_lengths=draft_lengths,
            drafts=drafts,
        )
