"""The policies' figures, against a step by step simulation of the documented matching."""

import random
from collections.abc import Sequence

import pytest

from benchmarks.drafter_policies import (
    Policy,
    measure_policy,
    measure_pooled_policy,
)
from benchmarks.held_out_texts import Continuation
from drafter.ngram.params import NgramParams, Tie
from drafter.ngram.table import EARLIEST, LATEST, LONGEST
from tests.drafter import brute_force, brute_force_pool

POOL_TIES = {Tie.EARLIEST: EARLIEST, Tie.LATEST: LATEST, Tie.LONGEST: LONGEST}


def alike_texts() -> list[Continuation]:
    """Texts with repetitions within and between them."""
    draw = random.Random(3)
    phrases = [[draw.randrange(1, 30) for _ in range(draw.randrange(4, 14))] for _ in range(12)]
    texts = []
    for _ in range(6):
        tokens = [token for phrase in draw.choices(phrases, k=20) for token in phrase]
        changed = [draw.randrange(1, 30) if draw.random() < 0.05 else token for token in tokens]
        texts.append(Continuation(known_token_ids=changed[:50], coming_token_ids=changed[50:120]))
    return texts


def figures_by_law(
    policy: Policy, texts: Sequence[Continuation], *, is_pooled: bool
) -> tuple[float, float]:
    """Returns (tokens per step, drafted per accepted token)."""
    num_tokens = num_steps = num_drafted = num_accepted = 0
    params, kept = policy.params, list[Sequence[int]]()
    for text in texts:
        drafter = brute_force.Drafter(params)
        context, coming = list(text.known_token_ids), list(text.coming_token_ids)
        while coming:
            max_draft_tokens = min(policy.draft_tokens, len(coming) - 1)
            draft, match_length = drafter.propose(context, max_draft_tokens) or ([], 0)
            if is_pooled and (params.tie is Tie.LONGEST or not match_length):
                found = brute_force_pool.find(
                    kept,
                    context,
                    min_ngram=params.min_ngram,
                    max_ngram=params.max_ngram,
                    tie=POOL_TIES[params.tie],
                    max_draft_tokens=max_draft_tokens,
                )
                if found is not None and found[1] > match_length:
                    draft, match_length = found
                    if params.tie is Tie.LONGEST:
                        draft = draft[: params.tokens_per_match * match_length]
            accepted = 0
            while accepted < len(draft) and draft[accepted] == coming[accepted]:
                accepted += 1
            context, coming = context + coming[: accepted + 1], coming[accepted + 1 :]
            num_tokens += accepted + 1
            num_steps += 1
            num_drafted += len(draft)
            num_accepted += accepted
        kept.append(text.coming_token_ids)
    return num_tokens / num_steps, num_drafted / num_accepted


@pytest.mark.parametrize(
    "params",
    [
        NgramParams(min_ngram=1, max_ngram=3, tie=Tie.EARLIEST),
        NgramParams(min_ngram=2, max_ngram=5, tie=Tie.LATEST),
        NgramParams(min_ngram=1, max_ngram=5, tie=Tie.LONGEST, tokens_per_match=1),
        NgramParams(min_ngram=1, max_ngram=5, tie=Tie.LONGEST, tokens_per_match=2),
    ],
)
def test_figures_are_those_of_the_simulation_with_and_without_a_pool(params: NgramParams) -> None:
    policy = Policy(name="measured", params=params, draft_tokens=16)
    texts = alike_texts()
    for measure, is_pooled in ((measure_policy, False), (measure_pooled_policy, True)):
        figure = measure(policy, "alike", texts)
        assert (
            figure.tokens_per_step,
            figure.drafted_per_accepted,
        ) == figures_by_law(policy, texts, is_pooled=is_pooled)
        assert figure.num_texts == len(texts)


def test_an_earlier_output_improves_drafts() -> None:
    params = NgramParams(min_ngram=1, max_ngram=5, tie=Tie.LONGEST, tokens_per_match=1)
    policy = Policy(name="measured", params=params, draft_tokens=16)
    alone = measure_policy(policy, "alike", alike_texts())
    pooled = measure_pooled_policy(policy, "alike", alike_texts())
    assert pooled.tokens_per_step > 1.2 * alone.tokens_per_step
