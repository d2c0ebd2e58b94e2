"""The samplers with the noise given, and their import paths."""

import importlib

import numpy as np
import numpy.typing as npt
import pytest
import torch

from verifier.sampling import sample_greedy, sample_match, sample_ratio
from verifier.sampling.rejection_sampler import PADDING

FloatArray = npt.NDArray[np.float64]


def naive_ratio(
    probs: FloatArray,
    drafts: list[int],
    counts: list[int],
    accept_uniforms: FloatArray,
    emit_uniforms: FloatArray,
) -> tuple[list[list[int]], list[int]]:
    """The oracle: sequence by sequence, row by row."""
    outputs, accepted = [], []
    row = draft = 0
    for count in counts:
        output: list[int] = []
        rejected = False
        for j in range(count + 1):
            mass = probs[row + j].copy()
            if j < count:
                token_id = drafts[draft + j]
                own = mass[token_id] if 0 <= token_id < len(mass) else 0.0
                if accept_uniforms[draft + j] < own:
                    output.append(token_id)
                    continue
                if 0 <= token_id < len(mass):
                    mass[token_id] = 0.0
                rejected = True
            cumulative = np.cumsum(mass)
            output.append(
                int(np.flatnonzero(cumulative > emit_uniforms[row + j] * cumulative[-1])[0])
            )
            break
        outputs.append(output)
        accepted.append(len(output) - 1)
        assert rejected or len(output) == count + 1
        row += count + 1
        draft += count
    width = max(counts) + 1
    return [o + [PADDING] * (width - len(o)) for o in outputs], accepted


@pytest.mark.parametrize("as_tensor", [False, True])
def test_ratio_equals_the_loop(as_tensor: bool) -> None:
    draw = np.random.default_rng(4)
    for _ in range(200):
        counts = draw.integers(0, 5, size=draw.integers(1, 6)).tolist()
        num_rows, num_drafts = sum(counts) + len(counts), sum(counts)
        probs = draw.dirichlet(np.full(6, 0.5), size=num_rows)
        drafts = draw.integers(-1, 8, size=num_drafts).tolist()
        accept_uniforms, emit_uniforms = draw.random(num_drafts), draw.random(num_rows)
        output, accepted = sample_ratio(
            torch.from_numpy(probs),
            torch.tensor(drafts, dtype=torch.int64),
            torch.tensor(counts) if as_tensor else counts,
            torch.from_numpy(accept_uniforms),
            torch.from_numpy(emit_uniforms),
        )
        expected = naive_ratio(probs, drafts, counts, accept_uniforms, emit_uniforms)
        assert (output.tolist(), accepted.tolist()) == expected


def test_both_rules_sample_the_target_distribution() -> None:
    draw = np.random.default_rng(5)
    num_trials, probs = 60_000, np.array([0.5, 0.3, 0.15, 0.05])
    rows = torch.from_numpy(np.tile(probs, (2 * num_trials, 1)))
    for draft in range(4):
        drafts = torch.full((num_trials,), draft)
        by_ratio, _ = sample_ratio(
            rows,
            drafts,
            [1] * num_trials,
            torch.from_numpy(draw.random(num_trials)),
            torch.from_numpy(draw.random(2 * num_trials)),
        )
        noise = torch.from_numpy(draw.exponential(size=rows.shape))
        by_match, _ = sample_match(rows, drafts, [1] * num_trials, noise)
        for output in (by_ratio, by_match):
            counts = np.bincount(output[:, 0].numpy(), minlength=4)
            expected = probs * num_trials
            chi_square = ((counts - expected) ** 2 / expected).sum()
            assert chi_square < 21.1  # upper 1e-4 point, 3 degrees of freedom


def test_a_race_breaks_ties_by_the_lowest_id_and_never_picks_probability_0() -> None:
    probs, none = torch.tensor([[0.0, 0.5, 0.5, 0.0]]), torch.zeros(0)
    for noise in (torch.ones(1, 4), torch.tensor([[1e-30, 1.0, 1.0, 1e-30]])):
        assert sample_match(probs, none, [0], noise)[0].tolist() == [[1]]


def test_the_samplers_public_names_are_importable_by_their_documented_paths() -> None:
    """Code outside this repository imports these."""
    names = {
        "verifier.sampling": {
            *("Sampling", "sample_greedy", "sample_match", "sample_ratio", "target_probs"),
        },
        "verifier.rejection_sampler": {"sample_greedy", "sample_match", "sample_ratio"},
        "verifier.logits_processing": {"target_probs"},
    }
    for path, exported in names.items():
        module = importlib.import_module(path)
        assert set(module.__all__) == exported
        assert all(callable(getattr(module, name)) for name in exported)


def test_greedy_picks_the_lowest_id_among_the_likeliest() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0], [0.0, 0.0, 5.0], [3.0, 3.0, 3.0]])
    output, accepted = sample_greedy(logits, torch.tensor([1, 2]), [2])
    assert (output.tolist(), accepted.tolist()) == ([[1, 2, 0]], [2])
    output, accepted = sample_greedy(logits, torch.tensor([2, 2]), [2])
    assert (output.tolist(), accepted.tolist()) == ([[1, PADDING, PADDING]], [0])
