"""What the drafter's index costs: time per proposal and per appended token, bytes per token.

Histories differ, come in shuffled order, and everything else is driven out of the caches before
each measurement, as it is in a server that serves hundreds of long contexts.
"""

import resource
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.drafter_texts import ask
from drafter.answerer import Answerer
from drafter.indexed_text import HASH_BASE, IndexedText
from drafter.ngram_index import DONE
from drafter.ngram_params import Algorithm, NgramParams, Tie
from drafter.proposal_kernel import answer_texts

BATCH = 256
DRAFT_TOKENS = 8
LENGTHS = (1_000, 8_000, 32_000, 131_000)
MAX_TOKENS = 1 << 20
# Larger than any cache: writing it leaves nothing else there.
_FLUSH_BYTES = 128 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalCost:
    """Of one sequence of the batch, without and with the append: median and best of the rounds."""

    policy: str
    num_tokens: int
    hits: bool
    proposal_ns: float
    best_proposal_ns: float
    append_and_proposal_ns: float
    best_append_and_proposal_ns: float
    num_drafts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCost:
    """Of texts in which no n-gram occurs twice: the worst for an index."""

    policy: str
    num_tokens: int
    append_ns_per_token: float
    bytes_per_token: float
    worst_bytes_per_token: float
    """At any length on the way there, from 1,000 tokens on."""
    reported_to_resident: float
    """Reported bytes over what the process really grew by, for all texts of the batch."""


POLICIES = {
    "index, earliest": NgramParams(),
    "index, latest": NgramParams(tie=Tie.LATEST),
    "index, longest": NgramParams(tie=Tie.LONGEST, tokens_per_match=2),
    "KMP, earliest": NgramParams(algorithm=Algorithm.KMP),
}


def measure_kernels(
    policy: str, num_tokens: int, *, num_rounds: int
) -> list[ProposalCost | TextCost]:
    """Builds a batch of histories, then asks for proposals that miss and that hit."""
    params = POLICIES[policy]
    answerer = Answerer()
    answerer.warm_up()
    rng = np.random.default_rng(num_tokens)
    # Every token only once in a history, so that nothing ever matches but what is made to.
    source = rng.permutation(num_tokens + (BATCH + 1) * 64).astype(np.uint32)
    resident_bytes = _resident_bytes()
    texts, append_s, worst = [], 0.0, 0.0
    rows: list[ProposalCost | TextCost] = []
    for i in range(BATCH):
        text = IndexedText(params=params, max_tokens=MAX_TOKENS)
        tokens = source[i * 64 : i * 64 + num_tokens]
        start_s = time.perf_counter()
        for start in range(0, num_tokens, 8192):
            text.append(tokens[start : start + 8192])
            ask(answerer, [text], [0])
        append_s += time.perf_counter() - start_s
        texts.append(text)
    reported = sum(text.allocated_bytes for text in texts)
    grown_bytes = _resident_bytes() - resident_bytes
    if params.algorithm is Algorithm.INDEX:
        text = IndexedText(params=params, max_tokens=MAX_TOKENS)
        for start in range(0, num_tokens, 100):
            text.append(source[start : min(start + 100, num_tokens)])
            ask(answerer, [text], [0])
            if text.length >= 1000:
                worst = max(worst, text.allocated_bytes / text.length)
        rows.append(
            TextCost(
                policy=policy,
                num_tokens=num_tokens,
                append_ns_per_token=append_s / num_tokens / BATCH * 1e9,
                bytes_per_token=reported / num_tokens / BATCH,
                worst_bytes_per_token=worst,
                reported_to_resident=reported / grown_bytes,
            )
        )
    for hits in (False, True):
        rows.append(_measure_proposals(policy, texts, source, num_tokens, num_rounds, hits=hits))
    return rows


def _measure_proposals(
    policy: str,
    texts: list[IndexedText],
    source: npt.NDArray[np.uint32],
    num_tokens: int,
    num_rounds: int,
    *,
    hits: bool,
) -> ProposalCost:
    rng = np.random.default_rng(1)
    answerer = Answerer()
    flush = np.zeros(_FLUSH_BYTES, dtype=np.uint8)
    separate_ns, joint_ns, num_drafts = [], [], 0
    fresh = 2**31
    for round_ in range(2 * num_rounds):
        order = rng.permutation(BATCH)
        for i in order:
            if hits:
                # Four tokens of the history again; the fifth is appended below.
                start = int(rng.integers(0, num_tokens - 32))
                appended = source[i * 64 + start : i * 64 + start + 5]
            else:
                appended = np.arange(fresh, fresh + 5, dtype=np.uint32)
                fresh += 5
            texts[i].append(appended[:4])
            ask(answerer, [texts[i]], [0])
            texts[i].append(appended[4:])
        flush += 1
        batch = [texts[i] for i in order]
        if round_ % 2:
            elapsed_ns, found = _time_call(batch, DRAFT_TOKENS)
            joint_ns.append(elapsed_ns / BATCH)
            num_drafts = found
        else:
            _time_call(batch, 0)
            flush += 1
            elapsed_ns, found = _time_call(batch, DRAFT_TOKENS)
            separate_ns.append(elapsed_ns / BATCH)
    return ProposalCost(
        policy=policy,
        num_tokens=num_tokens,
        hits=hits,
        proposal_ns=statistics.median(separate_ns),
        best_proposal_ns=min(separate_ns),
        append_and_proposal_ns=statistics.median(joint_ns),
        best_append_and_proposal_ns=min(joint_ns),
        num_drafts=num_drafts,
    )


def _time_call(texts: list[IndexedText], most_tokens: int) -> tuple[float, int]:
    """Returns nanoseconds of one kernel call, by one thread, and how many drafts it made."""
    count = len(texts)
    headers = np.array([text.address for text in texts], dtype=np.int64)
    wanted = np.full(count, most_tokens, dtype=np.int64)
    starts = np.arange(count, dtype=np.int64) * most_tokens
    drafts = np.empty(count * most_tokens + 1, dtype=np.uint32)
    lengths, reaches, known, statuses = np.empty((4, count), dtype=np.int64)
    start_ns = time.perf_counter_ns()
    answer_texts(
        headers, wanted, HASH_BASE, 1 << 40, 0, starts, drafts, lengths, reaches, known, statuses
    )
    elapsed_ns = time.perf_counter_ns() - start_ns
    for text, status in zip(texts, statuses.tolist(), strict=True):
        if status != DONE:
            # A table had to grow: rare, and its proposal is left out.
            ask(Answerer(), [text], [0])
    return elapsed_ns, int(np.count_nonzero(lengths))


def _resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()
