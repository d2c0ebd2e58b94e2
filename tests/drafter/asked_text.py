"""Texts put to the kernels without a server around them."""

from collections.abc import Sequence

import numpy as np

from drafter.batch.answerer import Answerer, Answers, ScannedDraft
from drafter.ngram.index import DONE, MUST_GROW, MUST_SCAN
from drafter.ngram.params import Algorithm, NgramParams
from drafter.ngram.text import IndexedText

MAX_TOKENS = 1 << 20

KMP = NgramParams(algorithm=Algorithm.KMP)
"""Without an index, so that a text's bytes are counted in the head."""

EMPTY_BYTES = IndexedText(params=KMP, max_tokens=0).allocated_bytes
"""What such a text takes beside 4 bytes per token of its buffer."""

Draft = tuple[list[int], int]
"""The tokens, and how far back the match reaches."""


def text_of(context: Sequence[int], params: NgramParams) -> IndexedText:
    text = IndexedText(params=params, max_tokens=MAX_TOKENS)
    text.append(np.array(context, dtype=np.uint32))
    return text


def ask(
    texts: Sequence[IndexedText],
    most_tokens: Sequence[int],
    answerer: Answerer | None = None,
    most_lacking: int = 0,
) -> list[Draft | None]:
    """Answers all of them, however many calls that takes."""
    answerer = Answerer() if answerer is None else answerer
    drafts: dict[int, Draft | None] = {}
    while len(drafts) < len(texts):
        still_open = [i for i in range(len(texts)) if i not in drafts]
        answers = answerer.answer(
            [texts[i] for i in still_open],
            [most_tokens[i] for i in still_open],
            most_lacking=most_lacking,
        )
        for j, i in enumerate(still_open):
            status = int(answers.statuses[j])
            if status >= MUST_GROW:
                texts[i].grow_table(status - MUST_GROW)
            elif status == DONE:
                drafts[i] = _draft_of(answers, j)
            elif status == MUST_SCAN:
                scan = ScannedDraft(wanted=most_tokens[i], draft_start=int(answers.draft_starts[j]))
                found = None
                while found is None:
                    found = answerer.go_on_with_scan(texts[i].address, scan, answers.drafts)
                drafts[i] = _draft_of(found, 0)
    return [drafts[i] for i in range(len(texts))]


def propose(context: Sequence[int], params: NgramParams, max_draft_tokens: int) -> Draft | None:
    """The draft for a text that is asked about once."""
    return ask([text_of(context, params)], [max_draft_tokens])[0]


def _draft_of(answers: Answers, i: int) -> Draft | None:
    start, length = int(answers.draft_starts[i]), int(answers.draft_lengths[i])
    tokens = answers.drafts[start : start + length].tolist()
    return (tokens, int(answers.reaches[i])) if tokens else None
