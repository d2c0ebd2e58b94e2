"""How drafts are made for a request: the presets, and values that override one.

A preset reproduces a known drafter (docs/drafting.md has the table), and is tested against that
one's proposals. A request that names one gets all its values and may override single ones; the
others get `TANDEM`, with the gateway's own number of drafts. Pure.
"""

import dataclasses
from collections.abc import Mapping

from tandem.values import Algorithm, Overlap, Preset, SpeculationParams, Tie

# Drafts verified per step where their number does not follow the match: the rest of a longer draft
# is mostly wrong.
FIXED_NUM_SPECULATIVE_TOKENS = 7


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftingPolicy:
    """Which n-grams are matched, which match is continued, and how far.

    Attributes:
        mirrors_ngrams: whether an override of one n-gram size sets the other, too.
        tokens_per_match: with the tie `longest`: drafts verified per token of match length; 0: no
            such limit.
        pool_min_ngram: with the tie `earliest` or `latest`: the pool is searched when the
            sequence's own match is shorter than this; 0: only when there is none. With
            the tie `longest` it is always searched.
        num_speculative_tokens: the most drafts verified per step. None: the verifier's limit if the
            number of drafts follows the match; else `FIXED_NUM_SPECULATIVE_TOKENS`.
        runs_ahead: whether a proposal may be longer than one step's drafts, so that the next step
            finds the rest. The other drafters match anew at every step.
    """

    min_ngram: int
    max_ngram: int
    mirrors_ngrams: bool = False
    overlap: Overlap
    tie: Tie
    tokens_per_match: int = 0
    algorithm: Algorithm = "index"
    pool_min_ngram: int = 0
    num_speculative_tokens: int | None = None
    runs_ahead: bool = False

    @property
    def follows_match(self) -> bool:
        """Whether a longer match gets more drafts."""
        return self.tie == "longest" and self.tokens_per_match > 0

    def num_speculative_tokens_within(self, limit: int) -> int:
        """The most drafts verified per step by a verifier whose limit is `limit`."""
        if self.num_speculative_tokens is not None:
            return min(self.num_speculative_tokens, limit)
        return limit if self.follows_match else min(FIXED_NUM_SPECULATIVE_TOKENS, limit)

    def override(self, given: SpeculationParams) -> "DraftingPolicy":
        """The policy with the values that are given; it keeps its own for the others."""
        min_ngram, max_ngram = given.prompt_lookup_min, given.prompt_lookup_max
        if self.mirrors_ngrams:
            min_ngram, max_ngram = (
                max_ngram if min_ngram is None else min_ngram,
                min_ngram if max_ngram is None else max_ngram,
            )
        tie = given.tie or self.tie
        tokens_per_match = given.tokens_per_match
        if tie != "longest":
            tokens_per_match = 0
        elif tokens_per_match is None:
            of_longest = self if self.tie == "longest" else TANDEM
            tokens_per_match = of_longest.tokens_per_match
        return dataclasses.replace(
            self,
            min_ngram=self.min_ngram if min_ngram is None else min_ngram,
            max_ngram=self.max_ngram if max_ngram is None else max_ngram,
            overlap=given.overlap or self.overlap,
            tie=tie,
            tokens_per_match=tokens_per_match,
            algorithm=given.algorithm or self.algorithm,
            pool_min_ngram=self.pool_min_ngram
            if given.pool_min_ngram is None
            else given.pool_min_ngram,
            num_speculative_tokens=self.num_speculative_tokens
            if given.num_speculative_tokens is None
            else given.num_speculative_tokens,
        )


TANDEM = DraftingPolicy(
    min_ngram=1,
    max_ngram=5,
    overlap="disjoint",
    tie="longest",
    # The best figure; `benchmarks.drafter` compares some.
    tokens_per_match=2,
    runs_ahead=True,
)
_VLLM = DraftingPolicy(
    min_ngram=5,
    max_ngram=5,
    mirrors_ngrams=True,
    overlap="allowed",
    tie="earliest",
    algorithm="kmp",
)

#: By preset that a request can name.
POLICIES: Mapping[Preset, DraftingPolicy] = {
    "tandem": TANDEM,
    "vllm-kmp": dataclasses.replace(_VLLM, overlap="disjoint"),
    "vllm": _VLLM,
    "transformers": DraftingPolicy(
        min_ngram=1,
        max_ngram=2,
        overlap="allowed",
        tie="earliest",
        algorithm="kmp",
        num_speculative_tokens=10,
    ),
}
