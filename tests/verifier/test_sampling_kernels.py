"""The sampler's kernels against whole tensors in torch: the same tokens for any parameters."""

import dataclasses
import math
import tracemalloc

import numpy as np
import pytest
import torch

from benchmarks import torch_sampling
from benchmarks.torch_sampling import Tokens
from verifier.sampling import Sampling, philox
from verifier.sampling.acceptance_rules import race, win_race
from verifier.sampling.adjustments import Adjustments
from verifier.sampling.distribution import (
    NEAR,
    NUM_BUCKETS,
    exponentials,
    keep_first,
    new_scratch,
)
from verifier.sampling.logits_processing import History, sampling_probs
from verifier.sampling.rejection_sampler import AcceptanceRule, JudgedSequence, verify

SEEDS = np.random.default_rng(11)


def some_sampling(draw: np.random.Generator, vocab_size: int) -> Sampling:
    bias = draw.integers(0, vocab_size, 3) if draw.random() < 0.3 else ()
    return Sampling(
        temperature=float(draw.choice([0.0, 0.3, 0.8, 1.0, 1.0, 2.5, 1e-300, 1e300])),
        top_k=int(draw.choice([0, 0, 1, 7, vocab_size, vocab_size + 3, max(1, vocab_size // 3)])),
        top_p=float(draw.choice([1.0, 1.0, 0.95, 0.5, 1e-9])),
        min_p=float(draw.choice([0.0, 0.0, 0.02, 1.0])),
        repetition_penalty=float(draw.choice([1.0, 1.3, 0.8])),
        frequency_penalty=float(draw.choice([0.0, 0.4, -0.3])),
        presence_penalty=float(draw.choice([0.0, 0.6])),
        logit_bias=tuple({int(i): float(draw.normal()) for i in bias}.items()),
        min_new_tokens=int(draw.choice([0, 0, 5])),
        seed=int(draw.integers(0, 2**63)),
    )


def some_logits(draw: np.random.Generator, num_rows: int, vocab_size: int) -> torch.Tensor:
    rows = draw.normal(scale=draw.choice([0.01, 1.0, 4.0, 30.0]), size=(num_rows, vocab_size))
    if draw.random() < 0.4:
        rows = np.round(rows)  # many ties
    if draw.random() < 0.3:
        rows[draw.random(rows.shape) < 0.3] = -np.inf
        rows[:, 0] = 1.0
    if draw.random() < 0.2:
        rows[:, draw.integers(vocab_size)] = -1e30
    return torch.from_numpy(rows).float()


def check(draw: np.random.Generator, vocab_size: int, num_drafts: int) -> int:
    """Whether one random sequence gets the oracle's tokens; returns how many."""
    sampling = some_sampling(draw, vocab_size)
    logits = some_logits(draw, num_drafts + 1, vocab_size)
    prompt = draw.integers(0, vocab_size, 40).tolist()
    output = draw.integers(0, vocab_size, int(draw.integers(0, 6))).tolist()
    stops = (
        frozenset(draw.integers(0, vocab_size + 2, 2).tolist()) if vocab_size > 2 else frozenset()
    )
    rule = AcceptanceRule.RATIO if draw.random() < 0.3 else AcceptanceRule.MATCH

    def tokens(drafts: list[int]) -> Tokens:
        return Tokens(
            prompt_token_ids=prompt,
            output_token_ids=output,
            draft_token_ids=drafts,
            stop_token_ids=stops,
        )

    def oracle(drafts: list[int]) -> list[int]:
        return torch_sampling.sampled(
            logits[: len(drafts) + 1], sampling, tokens(drafts), 77, ratio=rule.value == "ratio"
        )

    # Drafts that are accepted, as far as the oracle decides; the last one is often wrong.
    drafts: list[int] = []
    while len(drafts) < num_drafts:
        drafts.append(oracle(drafts)[-1])
    if drafts and draw.random() < 0.5:
        drafts[-1] = int(draw.choice([-1, 0, vocab_size, 2**40]))
    expected = oracle(drafts)
    history = History.of(
        sampling,
        prompt_token_ids=prompt,
        output_token_ids=output,
        draft_token_ids=drafts,
        stop_token_ids=stops,
    )
    verdict = verify(
        logits.numpy(),
        [JudgedSequence(sampling=sampling, history=history, first_position=77)],
        draft_token_ids=np.array(drafts, dtype=np.int64),
        num_draft_tokens=np.array([num_drafts]),
        rule=rule,
    )
    kept = next((i for i, d in enumerate(drafts) if expected[i] != d), num_drafts)
    got = verdict.output_token_ids[0, : verdict.num_accepted_tokens[0] + 1].tolist()
    assert got == expected[: kept + 1], (sampling, rule)
    return len(got)


@pytest.mark.parametrize(("vocab_size", "num_cases"), [(1, 30), (2, 100), (17, 400), (700, 200)])
def test_tokens_are_the_oracles(vocab_size: int, num_cases: int) -> None:
    draw = np.random.default_rng(vocab_size)
    num_tokens = sum(check(draw, vocab_size, int(draw.integers(0, 4))) for _ in range(num_cases))
    assert num_tokens > num_cases


def test_tokens_of_a_large_vocabulary_are_the_oracles() -> None:
    draw = np.random.default_rng(3)
    for _ in range(8):
        check(draw, 152_000, 0)


@pytest.mark.parametrize("vocab_size", [17, 3000])
def test_probabilities_are_the_oracles(vocab_size: int) -> None:
    draw = np.random.default_rng(4)
    num_different = num_compared = num_edges = 0
    for _ in range(200):
        sampling = dataclasses.replace(some_sampling(draw, vocab_size), temperature=0.9)
        logits = some_logits(draw, 1, vocab_size)
        tokens = Tokens(prompt_token_ids=[0], output_token_ids=[], draft_token_ids=[])
        rows = torch_sampling.adjusted_logits(logits, sampling, tokens)
        expected, *almost = (
            torch_sampling.row_probs(
                rows, [dataclasses.replace(sampling, top_p=min(1.0, sampling.top_p * factor))]
            )[0].numpy()
            for factor in (1.0, 1 - 1e-12, 1 + 1e-12)
        )
        if not np.array_equal(almost[0] > 0, almost[1] > 0):
            num_edges += 1  # rounding decides which token top-p cuts first
            continue
        history = History.of(sampling, prompt_token_ids=[0], output_token_ids=[])
        [probs] = sampling_probs(logits.numpy(), sampling, history)
        assert np.array_equal(probs > 0, expected > 0), sampling
        np.testing.assert_allclose(probs, expected, rtol=2e-7)
        num_different += int((probs != expected).sum())
        num_compared += int((expected > 0).sum())
    assert num_edges < 20
    # Both round from float64, so they rarely round apart.
    assert num_different <= num_compared // 1000


@pytest.mark.parametrize("scale", [0.0, 1.0, 12.0, 300.0])
def test_the_race_skips_no_token_that_could_win(scale: float) -> None:
    """Against the race in which every token's noise is computed."""
    draw = np.random.default_rng(int(scale))
    for count in (1, 255, 256, 257, 3000):
        token_ids = np.sort(draw.choice(2**20, count, replace=False)).astype(np.int32)
        weights = np.exp(-scale * draw.random(count))
        probs = (weights / weights.sum()).astype(np.float32).astype(np.float64)
        for position in range(40):
            seed = np.uint64(draw.integers(2**63))
            uniforms = philox.uniforms(
                np.full(count, seed), np.full(count, position), token_ids.astype(np.int64),
                philox.Purpose.MATCH,
            )  # fmt: skip
            noise = np.array([-math.log(u) for u in uniforms.tolist()])
            [winner] = race(probs[None], noise[None])
            assert win_race(probs, token_ids, count, seed, position) == token_ids[winner]


def test_a_limit_that_rounding_moves_cuts_where_it_is() -> None:
    """Limits equal to what the first buckets add up to: added in another order, they may differ in
    the last bit. One token more or less may be kept, no other.
    """
    draw = np.random.default_rng(8)
    count = 200_000
    scaled = -2.0 * draw.random(count)
    scaled[0] = 0.0
    weights = np.exp(scaled)
    buckets = (-scaled / NEAR * (NUM_BUCKETS - 1)).astype(np.int64)
    sums = np.zeros(NUM_BUCKETS)
    np.add.at(sums, buckets, weights)
    before = 0.0
    for bucket in range(int(buckets.max())):
        before += sums[bucket]
        scratch = new_scratch(count)
        scratch.scaled[:], scratch.weights[:] = scaled, weights
        scratch.token_ids[:] = np.arange(count)
        num_kept = keep_first(count, before, scratch)
        assert abs(num_kept - int((buckets <= bucket).sum())) <= 1


def test_exponentials_are_within_two_units_in_the_last_place() -> None:
    values = -np.concatenate([np.linspace(0, 50, 20_001), np.linspace(50, 707, 5_001)])
    results = np.empty_like(values)
    exponentials(values, results, len(values))
    expected = np.array([math.exp(value) for value in values.tolist()])
    assert (np.abs(results - expected) <= 2 * np.spacing(expected)).all()
    assert results[0] == 1.0
    exponentials(np.array([-709.0, -1e308, -np.inf]), results, 3)
    assert (results[:3] == 0).all()


def test_counts_that_grow_are_those_of_the_whole_text() -> None:
    sampling = Sampling(frequency_penalty=1.0)
    draw = np.random.default_rng(5)
    for prompt_length in (1, 30, 200):
        text = draw.integers(0, 500, 400).tolist()
        growing = Adjustments(sampling, prompt_length=prompt_length)
        length = max(1, prompt_length // 2)
        while length < len(text):
            growing.count(text[:length])
            length += int(draw.integers(0, 9))
        growing.count(text)
        whole = Adjustments(sampling, prompt_length=prompt_length)
        whole.count(text)
        for adjustments in (growing, whole):
            arguments = adjustments.for_drafts([])
            token_ids = arguments.seen_token_ids[: arguments.num_seen].tolist()
            counts = arguments.counts[: arguments.num_seen].tolist()
            assert token_ids == sorted(set(text))
            assert counts == [text[prompt_length:].count(token_id) for token_id in token_ids]


def test_rows_are_processed_in_the_memory_of_one() -> None:
    num_rows, vocab_size = 300, 20_000
    logits = np.random.default_rng(6).normal(size=(num_rows, vocab_size)).astype(np.float32)
    sampling = Sampling(temperature=1.0, top_p=0.9, frequency_penalty=0.1, logprobs=2)
    sequences = [
        JudgedSequence(
            sampling=sampling,
            history=History.of(sampling, prompt_token_ids=[1], output_token_ids=[2]),
            first_position=5,
        )
    ] * num_rows

    def judge() -> None:
        verify(
            logits,
            sequences,
            draft_token_ids=np.zeros(0, dtype=np.int64),
            num_draft_tokens=np.zeros(num_rows, dtype=np.int64),
        )

    judge()
    before = resident_peak_bytes()
    tracemalloc.start()
    judge()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Of numpy's arrays; kernels' own are in the process's memory.
    assert peak < 1 << 20
    # A row in float64 alone is 160 kB, all of them 48 MB.
    assert resident_peak_bytes() - before < 8 << 20


def resident_peak_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
