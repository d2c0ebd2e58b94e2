"""The cost of the drafter's index: time per proposal and per appended token, bytes per token.

Histories are distinct and shuffled, and caches are cold before each measurement, as in a server
with hundreds of long contexts.
"""

import functools
import resource
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from benchmarks.drafter_texts import Call, propose
from benchmarks.held_out_texts import held_out_texts
from benchmarks.workloads import BUNDLED_MODEL
from drafter.budgets import MAX_UNINDEXED
from drafter.ngram.index import DONE
from drafter.ngram.params import Algorithm, NgramParams, Tie
from drafter.ngram.text import IndexedText
from drafter.warm_up import warm_up

Tokens = npt.NDArray[np.uint32]

BATCH = 256
DRAFT_TOKENS = 8
LENGTHS = (1_000, 8_000, 32_000, 131_000)
MAX_TOKENS = 1 << 20
TEXT_LENGTHS = (1_000, 8_000, 131_000)
FEW_TEXTS = 16
# Larger than any cache: writing it evicts everything else.
_FLUSH_BYTES = 128 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalCost:
    """Cost for one sequence of the batch, with one token appended: median and best round.

    Attributes:
        policy: a key of `POLICIES`.
        num_tokens: length of the histories.
        hits: whether there is a match.
        proposal_ns, best_proposal_ns: the proposal, with the new token not yet indexed, as in the
            server.
        index_ns, best_index_ns: indexing that token, which the server does after its response.
        num_drafts: of the last round.
    """

    policy: str
    num_tokens: int
    hits: bool
    proposal_ns: float
    best_proposal_ns: float
    index_ns: float
    best_index_ns: float
    num_drafts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCost:
    """Cost and size of indexing whole texts.

    Attributes:
        policy: a key of `POLICIES`.
        kind: "distinct": no n-gram twice; "twice": each n-gram twice, in another order the second
            time; "source": Python's test modules.
        num_tokens: length of each text.
        append_ns_per_token: to append in deltas of 8,192 tokens, and to index.
        bytes_per_token: at the end.
        worst_bytes_per_token: the maximum on the way, from 1,000 tokens on.
    """

    policy: str
    kind: str
    num_tokens: int
    append_ns_per_token: float
    bytes_per_token: float
    worst_bytes_per_token: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCheck:
    """Reported bytes / growth of the process, for all texts of a batch."""

    policy: str
    num_tokens: int
    reported_to_resident: float


POLICIES = {
    "index, longest": NgramParams(tie=Tie.LONGEST, tokens_per_match=2),
    "KMP, earliest": NgramParams(algorithm=Algorithm.KMP),
}


def measure_proposals(
    policy: str, num_tokens: int, *, num_rounds: int
) -> list[ProposalCost | MemoryCheck]:
    """Builds a batch of histories, then makes proposals that miss and that hit."""
    params = POLICIES[policy]
    warm_up()
    rng = np.random.default_rng(num_tokens)
    # Each token occurs once in a history, so only constructed matches hit.
    source = rng.permutation(num_tokens + (BATCH + 1) * 64).astype(np.uint32)
    resident_bytes = _resident_bytes()
    texts = [_build(params, source[i * 64 : i * 64 + num_tokens]) for i in range(BATCH)]
    reported = sum(text.allocated_bytes for text in texts)
    rows: list[ProposalCost | MemoryCheck] = [
        MemoryCheck(
            policy=policy,
            num_tokens=num_tokens,
            reported_to_resident=reported / (_resident_bytes() - resident_bytes),
        )
    ]
    for hits in (False, True):
        rows.append(_ask_batch(policy, texts, source, num_tokens, num_rounds, hits=hits))
    return rows


def measure_texts(policy: str) -> list[TextCost]:
    """Indexes a few texts of every kind and length."""
    params = POLICIES[policy]
    warm_up()
    rng = np.random.default_rng(1)
    rows = []
    for kind in ("distinct", "twice", "source"):
        for num_tokens in TEXT_LENGTHS:
            texts = [_text_of(kind, num_tokens, rng) for _ in range(FEW_TEXTS)]
            if len(texts[0]) < num_tokens:
                continue
            start_s = time.perf_counter()
            built = [_build(params, tokens) for tokens in texts]
            elapsed_s = time.perf_counter() - start_s
            worst = 0.0
            text = IndexedText(params=params, max_tokens=MAX_TOKENS)
            for start in range(0, num_tokens, 100):
                text.append(texts[0][start : start + 100])
                propose([text], [0])
                if text.length >= 1000:
                    worst = max(worst, text.allocated_bytes / text.length)
            rows.append(
                TextCost(
                    policy=policy,
                    kind=kind,
                    num_tokens=num_tokens,
                    append_ns_per_token=elapsed_s / num_tokens / FEW_TEXTS * 1e9,
                    bytes_per_token=statistics.mean(t.allocated_bytes for t in built) / num_tokens,
                    worst_bytes_per_token=worst,
                )
            )
    return rows


def _text_of(kind: str, num_tokens: int, rng: np.random.Generator) -> Tokens:
    if kind == "source":
        tokens = _source_tokens()
        start = int(rng.integers(0, max(1, len(tokens) - num_tokens)))
        return tokens[start : start + num_tokens]
    if kind == "distinct":
        return rng.permutation(num_tokens).astype(np.uint32)
    first = rng.permutation(-(-num_tokens // 2)).astype(np.uint32)
    # The second time in pieces of 40.
    pieces = np.array_split(first, max(1, len(first) // 40))
    again = [pieces[i] for i in rng.permutation(len(pieces))]
    return np.concatenate([first, *again])[:num_tokens]


@functools.cache
def _source_tokens() -> Tokens:
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    texts, _ = held_out_texts(tokenizer)
    parts = [[*text.known_token_ids, *text.coming_token_ids] for text in texts.get("source", [])]
    return np.array([token for part in parts for token in part], dtype=np.uint32)


def _build(params: NgramParams, tokens: Tokens) -> IndexedText:
    text = IndexedText(params=params, max_tokens=MAX_TOKENS)
    for start in range(0, len(tokens), 8192):
        text.append(tokens[start : start + 8192])
        propose([text], [0])
    return text


def _ask_batch(
    policy: str,
    texts: list[IndexedText],
    source: Tokens,
    num_tokens: int,
    num_rounds: int,
    *,
    hits: bool,
) -> ProposalCost:
    rng = np.random.default_rng(1)
    flush = np.zeros(_FLUSH_BYTES, dtype=np.uint8)
    proposal_ns, index_ns, num_drafts = [], [], 0
    fresh = 2**31
    for _ in range(num_rounds):
        order = rng.permutation(BATCH)
        for i in order:
            if hits:
                # Repeats four tokens of the history; the fifth is appended below.
                start = int(rng.integers(0, num_tokens - 32))
                appended = source[i * 64 + start : i * 64 + start + 5]
            else:
                appended = np.arange(fresh, fresh + 5, dtype=np.uint32)
                fresh += 5
            texts[i].append(appended[:4])
            propose([texts[i]], [0])
            texts[i].append(appended[4:])
        batch = [texts[i] for i in order]
        flush += 1
        elapsed_ns, num_drafts = _time_call(batch, DRAFT_TOKENS)
        proposal_ns.append(elapsed_ns / BATCH)
        flush += 1
        elapsed_ns, _ = _time_call(batch, 0)
        index_ns.append(elapsed_ns / BATCH)
    return ProposalCost(
        policy=policy,
        num_tokens=num_tokens,
        hits=hits,
        proposal_ns=statistics.median(proposal_ns),
        best_proposal_ns=min(proposal_ns),
        index_ns=statistics.median(index_ns),
        best_index_ns=min(index_ns),
        num_drafts=num_drafts,
    )


def _time_call(texts: list[IndexedText], max_tokens: int) -> tuple[float, int]:
    """Returns nanoseconds of one kernel call on one thread, and its number of drafts."""
    call = Call(texts, [max_tokens] * len(texts), budget=1 << 40, max_unindexed=MAX_UNINDEXED)
    start_ns = time.perf_counter_ns()
    call.run()
    elapsed_ns = time.perf_counter_ns() - start_ns
    for text, status in zip(texts, call.statuses.tolist(), strict=True):
        if status != DONE:
            # A table had to grow, which is rare: its proposal is left out.
            propose([text], [0])
    return elapsed_ns, int(np.count_nonzero(call.draft_lengths))


def _resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()
