"""What a sequence has to do with its pool: it drafts from it, and leaves its text in it.

The law, beside the one for the sequence's own text (`draft_kernel.py`):

- With `TIE_EARLIEST` and `TIE_LATEST` the pool is looked into when the sequence's own match reaches
  less far than `pool_min_ngram`, or when there is none; with `TIE_LONGEST` always.
- In the pool, the longest n-gram at the end of the context that occurs in a kept text, and is
  continued there, wins: its earliest or its latest occurrence in the order of feeding, or the one
  of both that reaches further back.
- The pool's draft is taken if it reaches further back than the sequence's own.
- `tokens_per_match` bounds it as it bounds the sequence's own; it is never chained.
- A reach ends where a kept text begins, and a draft where it ends.
- What a sequence feeds while it grows is no occurrence for itself: its own last tokens would hide
  what others have.

Knows neither how pools are kept (`pool_store.py`) nor who runs their work (`pool_keeper.py`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from drafter.batch.answerer import Answerer, Answers
from drafter.history.history import History
from drafter.ngram.params import MIN_POOL_FEED_TOKENS, Keep, NgramParams
from drafter.ngram.text import IndexedText
from drafter.pool_index.link import has_old_link, link_to_pool
from drafter.pool_index.propose import draft_from_pools
from drafter.pool_index.records import PoolLimits
from drafter.pools.store import PoolStore


class PoolDrafts:
    """Owned by the event loop, like the store that it uses."""

    def __init__(self, store: PoolStore, *, on_work: Callable[[], None]) -> None:
        """Wires it up.

        Args:
            store: all pools.
            on_work: called when the store may have work to do.
        """
        self.store = store
        self._on_work = on_work

    def see_to_work(self) -> None:
        """Has done what is to do, texts that expired included; returns at once."""
        if self.store.has_work:
            self._on_work()

    def feed(self, history: History) -> None:
        """Feeds its pool what a sequence has grown by, if it has by enough."""
        if history.is_feed_due:
            self._grow(history, history.length)

    def keep(self, history: History, keep: Keep, feed_id: str, length: int = 0) -> None:
        """Leaves a finished sequence's text in its pool, if it names one.

        Args:
            history: of a sequence that is not known any more.
            keep: what of its text. Of one that has fed its pool while it grew, what is left of
                the same text, unless nothing is to be kept.
            feed_id: see `PoolStore.feed`; that of one that fed its pool is its own id.
            length: its text ends there; 0: at its last token.
        """
        params = history.params
        if keep is Keep.NOTHING or not params.pool_id:
            return
        end = length or history.length
        if params.pool_feed_tokens > 0:
            self._grow(history, end)
            return
        start = history.prompt_length if keep is Keep.OUTPUT else 0
        self.store.feed(
            params.pool_id,
            history.token_ids[start:end],
            feed_id=feed_id,
            ngram_mask=params.ngram_mask,
        )
        self._on_work()

    def choose(
        self, texts: Sequence[IndexedText], wanted: npt.NDArray[np.int64], answers: Answers
    ) -> npt.NDArray[np.bool_]:
        """Gives each text its own draft or its pool's, by the law, in one kernel call.

        Args:
            texts: each once; those that name a pool are histories, which have a link to it.
            wanted: how long each draft may be, [num_texts].
            answers: what the texts themselves offer; changed in place.

        Returns:
            Whether the draft is the pool's, [num_texts].
        """
        is_from_pool = np.zeros(len(texts), dtype=np.bool_)
        if self.store.num_pools == 0:
            return is_from_pool
        headers = np.array([text.address for text in texts], dtype=np.int64)
        if has_old_link(headers, self.store.generation):
            self.link(texts)
        self.see_to_work()
        draft_from_pools(
            self.store.arena,
            headers,
            wanted,
            answers.statuses,
            answers.draft_starts,
            answers.drafts,
            answers.draft_lengths,
            answers.reaches,
            is_from_pool,
        )
        return is_from_pool

    def link(self, texts: Iterable[IndexedText]) -> None:
        """Puts down in each text where its pool is, by now."""
        for text in texts:
            params = text.params
            if params.pool_id:
                block = self.store.block_of(params.pool_id, params.ngram_mask)
                link_to_pool(text.address, self.store.generation, block)

    def _grow(self, history: History, end: int) -> None:
        params = history.params
        num_fed = self.store.grow(
            params.pool_id,
            history.token_ids[history.growing_from : end],
            feed_id=history.sequence_id,
            num_fed=history.num_fed,
            ngram_mask=params.ngram_mask,
        )
        history.note_fed(num_fed)
        self._on_work()


def warm_up_pools(answerer: Answerer) -> None:
    """Compiles the kernels, or loads them from disk: keeps a text, drafts from it, evicts it.

    Args:
        answerer: warm already.
    """
    limits = PoolLimits(max_pool_bytes=1 << 19, max_pools_bytes=1 << 20, pool_ttl_s=1.0)
    now_s = 0.0
    store = PoolStore(limits, clock=lambda: now_s, seed=1)
    drafts = PoolDrafts(store, on_work=store.finish)
    history = History(params=NgramParams(pool_id="warm"), prompt_length=0, max_tokens=4096)
    # Long enough that pages are split, and joined again when it goes.
    history.append(np.arange(1000, dtype=np.uint32))
    short = History(params=history.params, prompt_length=0, max_tokens=8)
    short.append(np.array([7, 8], dtype=np.uint32))

    growing = replace(history.params, pool_feed_tokens=MIN_POOL_FEED_TOKENS, pool_keep=Keep.ALL)

    def grow() -> None:
        text = History(params=growing, prompt_length=0, max_tokens=4096, sequence_id="warm")
        for _ in range(2):
            text.append(np.arange(100, dtype=np.uint32))
            drafts.feed(text)

    def keep_and_forget() -> None:
        nonlocal now_s
        drafts.keep(history, Keep.ALL, "")
        grow()
        # Behind another one, too.
        drafts.keep(history, Keep.ALL, "")
        assert drafts.choose(
            [short], np.ones(1, dtype=np.int64), answerer.answer([short], [1])
        ).all()
        now_s += limits.pool_ttl_s
        store.finish()

    keep_and_forget()
