"""Texts given to the drafter's kernels without a server, until all are answered."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from drafter.budgets import NGRAMS_PER_ANSWER
from drafter.history.history import History
from drafter.history.pool_drafts import PoolDrafts
from drafter.ngram.index import DONE, MUST_GROW, MUST_SCAN
from drafter.ngram.kmp import SCAN_WORDS
from drafter.ngram.params import NgramParams, Tie
from drafter.ngram.propose import propose_all
from drafter.ngram.text import HASH_BASE, IndexedText
from drafter.pool_index.propose import propose_from_pools
from gateway.requests.drafting_policy import TANDEM
from servicekit.kernels.memory import address_of

#: The product's policy.
PARAMS = NgramParams(
    min_ngram=TANDEM.min_ngram,
    max_ngram=TANDEM.max_ngram,
    tie=Tie.LONGEST,
    tokens_per_match=TANDEM.tokens_per_match,
)
Draft = tuple[list[int], int]
"""Its tokens, and how many tokens agree before its source."""


class Call:
    """One kernel call for some texts; what became of each is in the arrays.

    Attributes:
        statuses: see `drafter.ngram.index`, [num_texts].
        lengths: how many tokens each text has, [num_texts].
        draft_lengths: how many each draft has, [num_texts].
    """

    def __init__(
        self,
        texts: Sequence[IndexedText],
        max_tokens: Sequence[int],
        *,
        scans: npt.NDArray[np.int64] | None = None,
        budget: int = NGRAMS_PER_ANSWER,
        max_unindexed: int = 0,
        pools: PoolDrafts | None = None,
        hash_base: np.uint64 = HASH_BASE,
    ) -> None:
        """Makes it.

        Args:
            texts: each once.
            max_tokens: how long each draft may be; 0: only the index is brought up to date.
            scans: see `propose_all`; None: no scan goes on from call to call.
            budget: see `propose_all`.
            max_unindexed: see `propose_all`.
            pools: may have drafts, too; then all texts are histories.
            hash_base: of the texts' n-grams.
        """
        count = len(texts)
        headers = np.array([text.address for text in texts], dtype=np.int64)
        rooms = np.array(max_tokens, dtype=np.int64)
        self._headers, self._rooms, self._pools = headers, rooms, pools
        self._scans = np.zeros(count, dtype=np.int64) if scans is None else scans
        self._limits = hash_base, budget, max_unindexed
        self._starts = np.cumsum(rooms) - rooms
        self._drafts = np.empty(int(rooms.sum()), dtype=np.uint32)
        self.lengths, self.draft_lengths, self._match_lengths, self.statuses = np.empty(
            (4, count), dtype=np.int64
        )
        for text in texts:
            if pools is not None:
                assert isinstance(text, History)
                pools.link(text)

    def run(self) -> "Call":
        """Runs the kernel."""
        propose_all(
            *(self._headers, self._rooms, *self._limits, self._starts, self._drafts, self._scans),
            *(self.lengths, self.draft_lengths, self._match_lengths, self.statuses),
        )
        if self._pools is not None:
            propose_from_pools(
                self._pools.store.arena,
                *(self._headers, self._rooms, self.statuses, self._starts, self._drafts),
                *(self.draft_lengths, self._match_lengths),
                np.zeros(len(self._headers), dtype=np.bool_),
            )
        return self

    def draft(self, i: int) -> Draft:
        """Returns the draft of a text that is done; an empty one where nothing matched."""
        start, length = int(self._starts[i]), int(self.draft_lengths[i])
        return self._drafts[start : start + length].tolist(), int(self._match_lengths[i])


def propose(
    texts: Sequence[IndexedText],
    max_tokens: Sequence[int],
    *,
    max_unindexed: int = 0,
    pools: PoolDrafts | None = None,
    hash_base: np.uint64 = HASH_BASE,
) -> list[Draft]:
    """Returns the drafts of all texts, however many calls that takes. See `Call`."""
    drafts: list[Draft] = [([], 0)] * len(texts)
    progress = np.zeros((len(texts), SCAN_WORDS), dtype=np.int64)
    scans = address_of(progress) + 8 * SCAN_WORDS * np.arange(len(texts))
    still_open = list(range(len(texts)))
    while still_open:
        call = Call(
            [texts[i] for i in still_open],
            [max_tokens[i] for i in still_open],
            scans=scans[still_open],
            max_unindexed=max_unindexed,
            pools=pools,
            hash_base=hash_base,
        ).run()
        waiting = []
        for j, i in enumerate(still_open):
            status = int(call.statuses[j])
            if status == DONE:
                drafts[i] = call.draft(j)
                continue
            if status >= MUST_GROW:
                texts[i].grow_table(status - MUST_GROW)
            else:
                assert status <= MUST_SCAN
            waiting.append(i)
        still_open = waiting
    return drafts
