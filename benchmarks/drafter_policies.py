"""What each drafting policy is worth on held-out text, with the text itself as the model's output.

A step verifies one draft: what of it agrees with the text is accepted, and one more token comes of
the verification. Without a pool all texts of a kind take their steps together, as the sequences of
one batch; with one they go one after the other, and each leaves its output to those that follow.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.drafter_texts import ask
from benchmarks.held_out_texts import Continuation
from drafter.answerer import Answerer
from drafter.history import History
from drafter.ngram_params import Keep, NgramParams, Overlap, Tie
from drafter.pool_drafts import PoolDrafts
from drafter.pool_records import PoolLimits
from drafter.pool_store import PoolStore

_POOL_LIMITS = PoolLimits(max_pool_bytes=1 << 28, max_pools_bytes=1 << 29, pool_ttl_s=1e9)


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


def measure_policy(policy: Policy, kind: str, texts: Sequence[Continuation]) -> PolicyFigure:
    """Takes all texts to their ends."""
    count = _Count()
    _follow(policy, texts, Answerer(), None, count)
    return count.figure(policy, kind, len(texts))


def measure_pooled_policy(policy: Policy, kind: str, texts: Sequence[Continuation]) -> PolicyFigure:
    """Takes one text after the other to its end, and keeps its output for those that follow."""
    count, answerer = _Count(), Answerer()
    pools = PoolDrafts(PoolStore(_POOL_LIMITS, clock=lambda: 0.0, seed=1), on_work=lambda: None)
    policy = replace(
        policy, name=f"{policy.name}, pool", params=replace(policy.params, pool_id="all")
    )
    for text in texts:
        [history] = _follow(policy, [text], answerer, pools, count)
        pools.keep(history, Keep.OUTPUT, "")
        pools.store.finish()
    return count.figure(policy, kind, len(texts))


class _Count:
    def __init__(self) -> None:
        self.num_tokens = self.num_steps = self.num_drafted = self.num_accepted = 0

    def figure(self, policy: Policy, kind: str, num_texts: int) -> PolicyFigure:
        return PolicyFigure(
            policy=f"{policy.name}, k {policy.draft_tokens}",
            kind=kind,
            num_texts=num_texts,
            tokens_per_step=self.num_tokens / self.num_steps,
            drafted_per_accepted=self.num_drafted / max(self.num_accepted, 1),
        )


def _follow(
    policy: Policy,
    texts: Sequence[Continuation],
    answerer: Answerer,
    pools: PoolDrafts | None,
    count: _Count,
) -> list[History]:
    indexed = []
    for text in texts:
        history = History(
            params=policy.params, prompt_length=len(text.known_token_ids), max_tokens=1 << 20
        )
        history.append(np.array(text.known_token_ids, dtype=np.uint32))
        indexed.append(history)
    positions = [0] * len(texts)
    live = list(range(len(texts)))
    while live:
        wanted = []
        for i in live:
            # A draft leaves room for itself and the token that the step itself yields.
            remaining = len(texts[i].coming_token_ids) - positions[i]
            wanted.append(min(policy.draft_tokens, remaining - 1))
        drafts = ask(answerer, [indexed[i] for i in live], wanted, pools)
        for i, (draft, _) in zip(live, drafts, strict=True):
            coming = texts[i].coming_token_ids
            accepted = 0
            while accepted < len(draft) and draft[accepted] == coming[positions[i] + accepted]:
                accepted += 1
            new = coming[positions[i] : positions[i] + accepted + 1]
            indexed[i].append(np.array(new, dtype=np.uint32))
            positions[i] += len(new)
            count.num_tokens += len(new)
            count.num_steps += 1
            count.num_drafted += len(draft)
            count.num_accepted += accepted
        live = [i for i in live if positions[i] < len(texts[i].coming_token_ids)]
    return indexed
