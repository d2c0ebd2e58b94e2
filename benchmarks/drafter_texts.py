"""Drafts for texts by the drafter's kernels, without a server."""

from collections.abc import Sequence

import numpy as np

from drafter.answerer import Answerer, Answers, ScannedDraft
from drafter.indexed_text import IndexedText
from drafter.ngram_index import DONE, MUST_GROW, MUST_SCAN
from drafter.pool_drafts import PoolDrafts

Draft = tuple[list[int], int]
"""Draft tokens and match length."""


def ask(
    answerer: Answerer,
    texts: Sequence[IndexedText],
    most_tokens: Sequence[int],
    pools: PoolDrafts | None = None,
) -> list[Draft]:
    """Returns one draft per text, empty without a match."""
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
                drafts[i] = _draft_of(answers, j)
                continue
            if status == MUST_SCAN:
                start = int(answers.draft_starts[j])
                found = _scan(answerer, texts[i], most_tokens[i], start, answers)
                if pools is not None:
                    pools.choose([texts[i]], np.array([most_tokens[i]]), found)
                drafts[i] = _draft_of(found, 0)
                continue
            if status >= MUST_GROW:
                texts[i].grow_table(status - MUST_GROW)
            waiting.append(i)
        still_open = waiting
    return drafts


def _scan(
    answerer: Answerer, text: IndexedText, most_tokens: int, start: int, answers: Answers
) -> Answers:
    scan = ScannedDraft(wanted=most_tokens, draft_start=start)
    found = None
    while found is None:
        found = answerer.go_on_with_scan(text.address, scan, answers.drafts)
    return found


def _draft_of(answers: Answers, i: int) -> Draft:
    start, length = int(answers.draft_starts[i]), int(answers.draft_lengths[i])
    return answers.drafts[start : start + length].tolist(), int(answers.reaches[i])
