"""The gain of each drafting policy on held-out text, with the text itself as the model's output.

A step verifies one draft: its tokens that agree with the text are accepted, and verification gives
one more token. Without a pool all texts of a kind step together, as one batch; with one they run
one after the other, and each leaves its output to the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.drafter_texts import propose
from benchmarks.held_out_texts import Continuation
from drafter.history.history import History
from drafter.history.pool_drafts import PoolDrafts
from drafter.ngram.params import Keep, NgramParams, Tie
from drafter.pool_index.records import PoolLimits
from drafter.pools.store import PoolStore

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
    """One row per policy; the first ones are those of known drafters."""
    rows = []
    for low, high in ((1, 3), (2, 5), (3, 5)):
        for tie in (Tie.EARLIEST, Tie.LATEST):
            params = NgramParams(min_ngram=low, max_ngram=high, tie=tie)
            rows.append(Policy(name=f"n {low}..{high} {tie.value}", params=params, draft_tokens=8))
    wide = NgramParams(min_ngram=1, max_ngram=5)
    rows.append(Policy(name="n 1..5 earliest", params=wide, draft_tokens=32))
    for tokens_per_match, draft_tokens in ((1, 8), (1, 32), (2, 32), (4, 32)):
        params = NgramParams(
            min_ngram=1, max_ngram=5, tie=Tie.LONGEST, tokens_per_match=tokens_per_match
        )
        name = f"n 1..5 longest, x {tokens_per_match}"
        rows.append(Policy(name=name, params=params, draft_tokens=draft_tokens))
    return rows


def measure_policy(policy: Policy, kind: str, texts: Sequence[Continuation]) -> PolicyFigure:
    """Runs all texts to their ends, together."""
    count = _Count()
    _follow(policy, texts, None, count)
    return count.figure(policy, kind, len(texts))


def measure_pooled_policy(policy: Policy, kind: str, texts: Sequence[Continuation]) -> PolicyFigure:
    """Runs one text after the other, and feeds its output to the pool."""
    count = _Count()
    pools = PoolDrafts(PoolStore(_POOL_LIMITS, clock=lambda: 0.0, seed=1), on_work=lambda: None)
    policy = replace(
        policy, name=f"{policy.name}, pool", params=replace(policy.params, pool_id="all")
    )
    for text in texts:
        [history] = _follow(policy, [text], pools, count)
        pools.keep(history, Keep.OUTPUT)
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


class _Run:
    """A running text."""

    def __init__(self, policy: Policy, text: Continuation) -> None:
        self.history = History(
            params=policy.params,
            prompt_length=len(text.known_token_ids),
            max_tokens=1 << 20,
        )
        self.history.append(np.array(text.known_token_ids, dtype=np.uint32))
        self.coming = text.coming_token_ids
        self.position = 0

    @property
    def is_over(self) -> bool:
        return self.position == len(self.coming)


def _follow(
    policy: Policy,
    texts: Sequence[Continuation],
    pools: PoolDrafts | None,
    count: _Count,
) -> list[History]:
    runs = [_Run(policy, text) for text in texts]
    live = runs
    while live:
        _step(policy, live, pools, count)
        live = [run for run in live if not run.is_over]
    return [run.history for run in runs]


def _step(
    policy: Policy,
    live: Sequence[_Run],
    pools: PoolDrafts | None,
    count: _Count,
) -> None:
    """Runs one step of the given texts."""
    # A draft leaves room for the token that the step itself gives.
    max_draft_tokens = [
        min(policy.draft_tokens, len(run.coming) - run.position - 1) for run in live
    ]
    drafts = propose([run.history for run in live], max_draft_tokens, pools=pools)
    for run, (draft, _) in zip(live, drafts, strict=True):
        accepted = 0
        while accepted < len(draft) and draft[accepted] == run.coming[run.position + accepted]:
            accepted += 1
        new = run.coming[run.position : run.position + accepted + 1]
        run.history.append(np.array(new, dtype=np.uint32))
        run.position += len(new)
        count.num_tokens += len(new)
        count.num_steps += 1
        count.num_drafted += len(draft)
        count.num_accepted += accepted
