"""The sampler's kernels against whole tensors in torch: the same tokens for any parameters."""

import dataclasses
import math
import tracemalloc

import numpy as np
import pytest
import torch

from tests.verifier.sampling import torch_sampling
from tests.verifier.sampling.sampling_cases import (
    some_case,
    some_logits,
    some_sampling,
    verified_by_host,
)
from tests.verifier.sampling.torch_sampling import Tokens
from verifier.sampling import Sampling, philox
from verifier.sampling.adjustments import Adjustments
from verifier.sampling.distribution import (
    NEAR,
    NUM_BUCKETS,
    exponentials,
    keep_first,
    new_scratch,
)
from verifier.sampling.logits_processing import History, sampling_probs
from verifier.sampling.race import win_race
from verifier.sampling.rejection_sampler import JudgedSequence, verify


def usable(logits: torch.Tensor) -> list[bool]:
    """Of which rows the largest logit is finite, and none is NaN."""
    return logits.amax(dim=-1).isfinite().tolist()


def rounding_decides(rows: torch.Tensor, sampling: Sampling) -> bool:
    """Whether the last bits of sums say which token top-p cuts first.

    Args:
        rows: [n, V], adjusted.
    """
    if sampling.top_p == 1.0:
        return False
    one, other = (
        torch_sampling.row_probs(
            rows, [dataclasses.replace(sampling, top_p=sampling.top_p * factor)] * len(rows)
        )
        > 0
        for factor in (1 - 1e-12, 1 + 1e-12)
    )
    return not torch.equal(one, other)


def check(draw: np.random.Generator, vocab_size: int, max_num_drafts: int) -> int:
    """Whether one random sequence gets the oracle's tokens; returns how many, 0 if rounding decides
    which.
    """
    case = some_case(draw, vocab_size, max_num_drafts)
    tokens = Tokens(
        prompt_token_ids=case.prompt,
        output_token_ids=case.output,
        draft_token_ids=case.drafts,
        stop_token_ids=case.stop_token_ids,
    )
    logits = case.logits
    if case.masks is not None:
        # The oracle knows no constraint; no step before the temperature makes -inf anything else.
        bits = np.unpackbits(case.masks.view(np.uint8), axis=1, bitorder="little")
        is_allowed = torch.from_numpy(bits[:, :vocab_size]).bool()
        logits = logits.masked_fill(~is_allowed, -torch.inf)
    rows = torch_sampling.adjusted_logits(logits, case.sampling, tokens)
    if not case.sampling.is_greedy and rounding_decides(rows, case.sampling):
        return 0
    sampled = torch_sampling.sampled(logits, case.sampling, tokens, len(case.token_ids))
    is_usable = usable(case.logits)
    num_accepted = 0
    while num_accepted < len(case.drafts) and is_usable[num_accepted]:
        if sampled[num_accepted] != case.drafts[num_accepted]:
            break
        num_accepted += 1
    verdict = verified_by_host([case])
    assert verdict.num_accepted_tokens.tolist() == [num_accepted], case
    assert verdict.is_finite.tolist() == [is_usable[num_accepted]]
    expected = sampled[: num_accepted + is_usable[num_accepted]]
    assert verdict.output_token_ids[0, : len(expected)].tolist() == expected, case
    return len(expected)


@pytest.mark.parametrize(("vocab_size", "num_cases"), [(1, 30), (2, 100), (17, 400), (700, 200)])
def test_tokens_are_the_oracles(vocab_size: int, num_cases: int) -> None:
    draw = np.random.default_rng(vocab_size)
    num_tokens = sum(check(draw, vocab_size, 3) for _ in range(num_cases))
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
        if not all(usable(logits)):
            continue  # never sampled
        tokens = Tokens(prompt_token_ids=[0], output_token_ids=[], draft_token_ids=[])
        rows = torch_sampling.adjusted_logits(logits, sampling, tokens)
        if rounding_decides(rows, sampling):
            num_edges += 1
            continue
        expected = torch_sampling.row_probs(rows, [sampling])[0].numpy()
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
            )  # fmt: skip
            noise = np.array([-math.log(u) for u in uniforms.tolist()])
            winner = (probs / noise).argmax()
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
