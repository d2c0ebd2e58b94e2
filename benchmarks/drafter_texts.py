"""Texts put to the drafter's kernels without a server, until all are answered."""

from collections.abc import Sequence

import numpy as np

from drafter.answerer import Answerer
from drafter.indexed_text import IndexedText
from drafter.ngram_index import DONE, MUST_GROW
from drafter.pool_drafts import PoolDrafts

Draft = tuple[list[int], int]
"""Its tokens, and how far back the match reaches."""


def ask(
    answerer: Answerer,
    texts: Sequence[IndexedText],
    most_tokens: Sequence[int],
    pools: PoolDrafts | None = None,
) -> list[Draft]:
    """Answers all of them; an empty draft where nothing matches."""
    drafts: list[Draft] = [([], 0)] * len(texts)
    still_open = list(range(len(texts)))
    while still_open:
        answers = answerer.answer(
            [texts[i] for i in still_open], [most_tokens[i] for i in still_open]
        )
        if pools is not None:
            wanted = np.array([most_tokens[i] for i in still_open], dtype=np.int64)
            pools.choose([texts[i] for i in still_open], wanted, answers)
        waiting = []
        for j, i in enumerate(still_open):
            status = int(answers.statuses[j])
            if status == DONE:
                start, length = int(answers.draft_starts[j]), int(answers.draft_lengths[j])
                tokens = answers.drafts[start : start + length].tolist()
                drafts[i] = (tokens, int(answers.reaches[j]))
                continue
            if status >= MUST_GROW:
                texts[i].grow_table(status - MUST_GROW)
            waiting.append(i)
        still_open = waiting
    return drafts
