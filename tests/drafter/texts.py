"""Texts and their proposals by the kernels, without a server."""

from collections.abc import Sequence

import numpy as np

import benchmarks.drafter_texts
import drafter.ngram.text
from drafter.ngram.params import Algorithm, NgramParams, Tie
from drafter.ngram.text import IndexedText

MAX_TOKENS = 1 << 20

INDEXED = NgramParams(tie=Tie.LONGEST)
"""With an index."""

KMP = NgramParams(algorithm=Algorithm.KMP)
"""Without an index, so that a test can work out a text's bytes."""

EMPTY_BYTES = IndexedText(params=KMP, max_tokens=0).allocated_bytes
"""Of such a text, beside 4 bytes per token of its buffer."""

Draft = benchmarks.drafter_texts.Draft


def text_of(context: Sequence[int], params: NgramParams) -> IndexedText:
    text = IndexedText(params=params, max_tokens=MAX_TOKENS)
    text.append(np.array(context, dtype=np.uint32))
    return text


def propose_for(
    texts: Sequence[IndexedText], max_tokens: Sequence[int], max_unindexed: int = 0
) -> list[Draft | None]:
    """The draft of each text, None where nothing matched; in as many calls as needed."""
    drafts = benchmarks.drafter_texts.propose(
        texts,
        max_tokens,
        max_unindexed=max_unindexed,
        # Read here, since a test may have set another.
        hash_base=drafter.ngram.text.HASH_BASE,
    )
    return [draft if draft[0] else None for draft in drafts]


def propose(context: Sequence[int], params: NgramParams, max_draft_tokens: int) -> Draft | None:
    """The first draft of a text."""
    return propose_for([text_of(context, params)], [max_draft_tokens])[0]
