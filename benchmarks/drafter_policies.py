"""What each drafting policy is worth on held-out text, with the text itself as the model's output.

A step verifies one draft: what of it agrees with the text is accepted, and one more token comes of
the verification. All texts of a kind take their steps together, as the sequences of one batch.
"""

import importlib.util
import json
import pydoc_data.topics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from benchmarks.drafter_texts import ask
from benchmarks.workloads import HELD_OUT
from drafter.answerer import Answerer
from drafter.indexed_text import IndexedText
from drafter.ngram_params import NgramParams, Overlap, Tie

KNOWN_TOKENS = 1500
CONTINUED_TOKENS = 800
MAX_TEXTS = {"renames": 80, "source": 150, "documents": 19}


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """A text: what is known at first, and what the model is going to say."""

    known_token_ids: Sequence[int]
    coming_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    name: str
    params: NgramParams
    draft_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFigure:
    policy: str
    kind: str
    num_texts: int
    tokens_per_step: float
    drafted_per_accepted: float


def policies() -> list[Policy]:
    """Every policy a row; the first ones are those of known drafters."""
    rows = []
    for low, high in ((1, 3), (2, 5), (3, 5)):
        for tie in (Tie.EARLIEST, Tie.LATEST):
            params = NgramParams(min_ngram=low, max_ngram=high, tie=tie)
            rows.append(Policy(name=f"n {low}..{high} {tie.value}", params=params, draft_tokens=8))
    for tie in (Tie.EARLIEST, Tie.LATEST):
        params = NgramParams(overlap=Overlap.ALLOWED, tie=tie)
        rows.append(
            Policy(name=f"n 2..5 {tie.value}, overlap allowed", params=params, draft_tokens=8)
        )
    wide = NgramParams(min_ngram=1, max_ngram=5)
    rows.append(Policy(name="n 1..5 earliest", params=wide, draft_tokens=32))
    for tokens_per_match, draft_tokens in ((1, 8), (1, 32), (2, 32), (4, 32)):
        params = NgramParams(
            min_ngram=1, max_ngram=5, tie=Tie.LONGEST, tokens_per_match=tokens_per_match
        )
        name = f"n 1..5 longest, x {tokens_per_match}"
        rows.append(Policy(name=name, params=params, draft_tokens=draft_tokens))
    params = NgramParams(
        min_ngram=1, max_ngram=5, tie=Tie.LONGEST, tokens_per_match=2, chained=True
    )
    rows.append(Policy(name="n 1..5 longest, x 2, chained", params=params, draft_tokens=32))
    return rows


def held_out_texts(tokenizer: Tokenizer) -> tuple[dict[str, list[Continuation]], list[str]]:
    """Returns the texts by kind, and what to say of those kinds that are not to be had here."""
    texts: dict[str, list[Continuation]] = {"renames": _renames(tokenizer)}
    notes = []
    source = _source_texts()
    if source:
        texts["source"] = _continuations(tokenizer, source, MAX_TEXTS["source"])
    else:
        notes.append(
            "source: this Python comes without its test folder; install it (on Debian: "
            "libpython3-testsuite) for these rows"
        )
    documents = sorted(pydoc_data.topics.topics.values(), key=len, reverse=True)
    texts["documents"] = _continuations(tokenizer, documents, MAX_TEXTS["documents"])
    for kind in list(texts):
        if not texts[kind]:
            notes.append(f"{kind}: no text here is long enough")
            del texts[kind]
    return texts, notes


def measure_policy(policy: Policy, kind: str, texts: Sequence[Continuation]) -> PolicyFigure:
    """Takes all texts to their ends."""
    answerer = Answerer()
    indexed = []
    for text in texts:
        indexed_text = IndexedText(params=policy.params, max_tokens=1 << 20)
        indexed_text.append(np.array(text.known_token_ids, dtype=np.uint32))
        indexed.append(indexed_text)
    positions = [0] * len(texts)
    num_tokens = num_steps = num_drafted = num_accepted = 0
    live = list(range(len(texts)))
    while live:
        wanted = []
        for i in live:
            # A draft leaves room for itself and the token that the step itself yields.
            remaining = len(texts[i].coming_token_ids) - positions[i]
            wanted.append(min(policy.draft_tokens, remaining - 1))
        drafts = ask(answerer, [indexed[i] for i in live], wanted)
        for i, (draft, _) in zip(live, drafts, strict=True):
            coming = texts[i].coming_token_ids
            accepted = 0
            while accepted < len(draft) and draft[accepted] == coming[positions[i] + accepted]:
                accepted += 1
            new = coming[positions[i] : positions[i] + accepted + 1]
            indexed[i].append(np.array(new, dtype=np.uint32))
            positions[i] += len(new)
            num_tokens += len(new)
            num_steps += 1
            num_drafted += len(draft)
            num_accepted += accepted
        live = [i for i in live if positions[i] < len(texts[i].coming_token_ids)]
    return PolicyFigure(
        policy=f"{policy.name}, k {policy.draft_tokens}",
        kind=kind,
        num_texts=len(texts),
        tokens_per_step=num_tokens / num_steps,
        drafted_per_accepted=num_drafted / max(num_accepted, 1),
    )


def _renames(tokenizer: Tokenizer) -> list[Continuation]:
    tasks = [json.loads(line) for line in HELD_OUT.read_text().splitlines()[: MAX_TEXTS["renames"]]]
    return [
        Continuation(
            known_token_ids=tokenizer.encode(task["prompt"], add_special_tokens=False).ids,
            coming_token_ids=tokenizer.encode(task["reference"], add_special_tokens=False).ids,
        )
        for task in tasks
    ]


def _source_texts() -> list[str]:
    spec = importlib.util.find_spec("test")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    paths = sorted(path for folder in folders for path in Path(folder).rglob("*.py"))
    # From all over the folder, not the first of the alphabet.
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths[::3]]


def _continuations(
    tokenizer: Tokenizer, texts: Sequence[str], most_texts: int
) -> list[Continuation]:
    found: list[Continuation] = []
    for text in texts:
        if len(found) == most_texts:
            break
        ids = tokenizer.encode(text[:40_000], add_special_tokens=False).ids
        if len(ids) >= KNOWN_TOKENS + CONTINUED_TOKENS:
            found.append(
                Continuation(
                    known_token_ids=ids[:KNOWN_TOKENS],
                    coming_token_ids=ids[KNOWN_TOKENS : KNOWN_TOKENS + CONTINUED_TOKENS],
                )
            )
    return found
