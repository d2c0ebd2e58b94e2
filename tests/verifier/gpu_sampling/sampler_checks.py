"""The sampler on the device against the host's: the same tokens, counts and flags.

In the interpreter (`test_in_the_interpreter.py`), and on a GPU (`tests/gpu/test_sampling.py`).
"""

import dataclasses
import math

import numpy as np
import pytest
import torch

from tests.verifier.gpu_sampling.device_batches import (
    DEVICE,
    Case,
    assert_equal,
    rows_of,
    some_case,
    verified_by_device,
    verified_by_host,
)
from verifier.gpu.sampling.sampler import DeviceSampler
from verifier.gpu.sampling.slots import MAX_BIASES, MAX_STOP_TOKENS, is_sampled_on_device
from verifier.sampling import Sampling
from verifier.sampling.rejection_sampler import AcceptanceRule

# The interpreter computes in numpy, which warns of infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
RULES = list(AcceptanceRule)


def sampler_of(
    vocab_size: int, rule: AcceptanceRule = AcceptanceRule.MATCH, max_num_seqs: int = 6
) -> DeviceSampler:
    return DeviceSampler(
        device=DEVICE, vocab_size=vocab_size, max_num_seqs=max_num_seqs, max_num_drafts=4, rule=rule
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("vocab_size", [1, 2, 33, 300, 2048, 5003])
def test_a_mixed_batch_gets_the_tokens_of_the_host(vocab_size: int, rule: AcceptanceRule) -> None:
    draw = np.random.default_rng([vocab_size, RULES.index(rule)])
    sampler = sampler_of(vocab_size, rule)
    num_accepted = 0
    for _ in range(4):
        cases = [some_case(draw, vocab_size, 4, rule) for _ in range(draw.integers(1, 7))]
        num_rows = sum(len(case.drafts) + 1 for case in cases)
        is_usable = draw.random(num_rows) < 0.95 if draw.random() < 0.5 else None
        host = verified_by_host(cases, rule, is_usable)
        assert_equal(verified_by_device(sampler, cases, is_usable), host)
        num_accepted += int(host.num_accepted_tokens.sum())
    assert num_accepted > 0


@pytest.mark.parametrize("rule", RULES)
def test_more_rows_than_are_computed_at_a_time(rule: AcceptanceRule) -> None:
    draw = np.random.default_rng(5)
    cases = [some_case(draw, 40, 4, rule) for _ in range(30)]
    assert len(rows_of(cases)) > 64
    sampler = sampler_of(40, rule, max_num_seqs=30)
    assert_equal(verified_by_device(sampler, cases), verified_by_host(cases, rule))


def case_of(row: torch.Tensor, sampling: Sampling, drafts: tuple[int, ...] = ()) -> Case:
    """All rows alike."""
    rows = row.repeat(len(drafts) + 1, 1).float()
    return Case(sampling=sampling, prompt=[0], output=[], drafts=list(drafts), logits=rows)


HOSTILE_ROWS = {
    "all equal": torch.zeros(600),
    "all masked": torch.full((600,), -math.inf),
    "one token": torch.full((600,), -math.inf).index_fill(0, torch.tensor([417]), 2.0),
    "nan": torch.zeros(600).index_fill(0, torch.tensor([599]), math.nan),
    "all nan": torch.full((600,), math.nan),
    "infinite": torch.zeros(600).index_fill(0, torch.tensor([3]), math.inf),
    "nan under infinite": torch.tensor([math.inf, math.nan, *[0.0] * 598]),
    "huge": torch.full((600,), 3.4e38).index_fill(0, torch.tensor([5]), -3.4e38),
    "far apart": torch.linspace(-3e38, 3e38, 600),
    "two levels": (torch.arange(600) % 2).float(),
    "denormal": torch.linspace(-1e-44, 1e-44, 600),
    "just possible": torch.tensor([0.0, *[-708.0] * 300, *[-709.0] * 299]),
    "negative zeros": torch.tensor([-0.0, 0.0] * 300),
}
HOSTILE_SAMPLING = [
    Sampling(),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=1e-300, seed=2),
    Sampling(temperature=1e300, seed=3),
    Sampling(temperature=1.0, top_k=7, seed=2**64 - 1),
    Sampling(temperature=1.0, top_k=600, top_p=0.5, seed=2**63),
    Sampling(temperature=0.5, top_k=301, top_p=0.25, min_p=1e-300, seed=6),
    Sampling(temperature=1.0, top_p=1e-300, seed=7),
    Sampling(temperature=1.0, top_p=1 - 2**-53, seed=8),
    Sampling(temperature=1.0, min_p=1.0, seed=9),
    Sampling(temperature=1.0, repetition_penalty=1e-300, frequency_penalty=2.0, seed=10),
    Sampling(logit_bias=((417, 100.0), (5, -100.0)), repetition_penalty=1e300),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", HOSTILE_ROWS)
def test_hostile_rows(name: str, rule: AcceptanceRule) -> None:
    row = HOSTILE_ROWS[name]
    cases = [case_of(row, sampling, (0, 417)) for sampling in HOSTILE_SAMPLING]
    sampler = sampler_of(len(row), rule, max_num_seqs=len(cases))
    assert_equal(verified_by_device(sampler, cases), verified_by_host(cases, rule))


@pytest.mark.parametrize("top_k", [1, 599, 0])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 1.0])
def test_of_equal_logits_the_lowest_ids_are_kept(top_k: int, top_p: float) -> None:
    """A cut through equals is exact: sums of ones have no rounding."""
    num_kept = math.ceil(min(top_k or 600, 600) * top_p)
    seen = set()
    sampler = sampler_of(600, max_num_seqs=40)
    cases = [
        case_of(torch.zeros(600), Sampling(temperature=1.0, top_k=top_k, top_p=top_p, seed=seed))
        for seed in range(40)
    ]
    verdict = verified_by_device(sampler, cases)
    assert_equal(verdict, verified_by_host(cases, AcceptanceRule.MATCH))
    seen = set(verdict.output_token_ids[:, 0].tolist())
    assert max(seen) < num_kept
    assert len(seen) > min(num_kept, 40) // 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_are_widened(dtype: torch.dtype) -> None:
    draw = np.random.default_rng(8)
    cases = [some_case(draw, 100, 4, AcceptanceRule.MATCH) for _ in range(6)]
    for case in cases:
        case.logits = case.logits.to(dtype).float()
    device = verified_by_device(sampler_of(100), cases, dtype=dtype)
    assert_equal(device, verified_by_host(cases, AcceptanceRule.MATCH))


def test_logits_may_be_part_of_a_wider_tensor() -> None:
    draw = np.random.default_rng(9)
    cases = [some_case(draw, 100, 4, AcceptanceRule.MATCH) for _ in range(6)]
    host = verified_by_host(cases, AcceptanceRule.MATCH)
    sampler = sampler_of(100)
    slots = [
        sampler.open(c.sampling, prompt_length=len(c.prompt), stop_token_ids=c.stop_token_ids)
        for c in cases
    ]
    sampler.stage([case.staged(slot) for case, slot in zip(cases, slots, strict=True)])
    rows = rows_of(cases)
    wide = torch.full((len(rows) + 3, 131), math.nan, device=DEVICE)
    wide[: len(rows), :100] = rows.to(DEVICE)
    sampler.run(wide[:, :100])
    assert_equal(sampler.result(), host)


def test_a_sequence_of_the_host_does_not_change_the_others() -> None:
    draw = np.random.default_rng(10)
    cases = [some_case(draw, 100, 4, AcceptanceRule.MATCH) for _ in range(5)]
    sampler = sampler_of(100)
    expected = verified_by_host(cases, AcceptanceRule.MATCH)
    slots = [
        sampler.open(c.sampling, prompt_length=len(c.prompt), stop_token_ids=c.stop_token_ids)
        for c in cases
    ]
    staged = [case.staged(slot) for case, slot in zip(cases, slots, strict=True)]
    staged[2] = dataclasses.replace(staged[2], slot=None)
    sampler.stage(staged)
    sampler.run(rows_of(cases).to(DEVICE))
    verdict = sampler.result()
    others = [0, 1, 3, 4]
    np.testing.assert_array_equal(
        verdict.output_token_ids[others], expected.output_token_ids[others]
    )


def test_a_step_without_sequences() -> None:
    sampler = sampler_of(10)
    sampler.stage([])
    sampler.run(torch.empty(0, 10, device=DEVICE))
    assert len(sampler.result().num_accepted_tokens) == 0


def test_what_the_host_samples() -> None:
    none: frozenset[int] = frozenset()
    assert is_sampled_on_device(Sampling(temperature=1.0, top_k=3, prompt_logprobs=2), none)
    assert is_sampled_on_device(Sampling(is_constrained=True), frozenset(range(MAX_STOP_TOKENS)))
    biased = Sampling(logit_bias=tuple((i, 1.0) for i in range(MAX_BIASES + 1)))
    for sampling, stops in [
        (Sampling(logprobs=0), none),
        (biased, none),
        (Sampling(), frozenset(range(MAX_STOP_TOKENS + 1))),
    ]:
        assert not is_sampled_on_device(sampling, stops)
        with pytest.raises(ValueError, match="the host samples"):
            sampler_of(10).open(sampling, prompt_length=1, stop_token_ids=stops)


def test_as_many_biases_and_stop_tokens_as_there_may_be() -> None:
    draw = np.random.default_rng(12)
    ids = draw.permutation(5000)[:MAX_BIASES].tolist()
    sampling = Sampling(
        temperature=1.0,
        logit_bias=tuple((i, float(draw.normal(scale=5))) for i in ids),
        min_new_tokens=2,
        seed=4,
    )
    case = case_of(torch.zeros(5000), sampling, (1, 2, 3, 4))
    case.stop_token_ids = frozenset(ids[-MAX_STOP_TOKENS:])
    rule = AcceptanceRule.MATCH
    assert_equal(verified_by_device(sampler_of(5000), [case]), verified_by_host([case], rule))
