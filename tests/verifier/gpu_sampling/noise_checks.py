"""Noise and weights have the host's bits."""

import numpy as np
import torch
import triton
import triton.language as tl

from tests.verifier.gpu_sampling.device_batches import DEVICE
from verifier.gpu.sampling.kernels import jit, noise
from verifier.sampling import philox
from verifier.sampling.distribution import exponentials

SIZE = 4096


@jit.jit
def _fill_uniforms(seeds, positions, results, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    token_ids = tl.program_id(0) * 1000003 + tl.arange(0, SIZE)
    seed, position = tl.load(seeds + tl.program_id(0)), tl.load(positions + tl.program_id(0))
    places = results + tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(places, noise.uniform(token_ids, position, seed))


@jit.jit
def _fill_exponentials(values, results, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(results + places, noise.exponential(tl.load(values + places)))


def test_uniforms_are_those_of_the_host() -> None:
    draw = np.random.default_rng(0)
    seeds = np.array([0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1], dtype=np.uint64)
    seeds = np.concatenate((seeds, draw.integers(0, 2**64, 6, dtype=np.uint64)))
    positions = np.array([0, 1, 2**20, 2**31 - 1, 2**31, 2**32 - 1] * 2, dtype=np.int64)
    results = torch.zeros((len(seeds), SIZE), dtype=torch.float64, device=DEVICE)
    _fill_uniforms[(len(seeds),)](
        torch.from_numpy(seeds.view(np.int64)).to(DEVICE),
        torch.from_numpy(positions).to(DEVICE),
        results,
        SIZE=SIZE,
    )
    token_ids = np.arange(len(seeds))[:, None] * 1000003 + np.arange(SIZE)
    expected = philox.uniforms(
        np.repeat(seeds, SIZE), np.repeat(positions, SIZE), token_ids.ravel()
    )
    np.testing.assert_array_equal(results.cpu().numpy().ravel(), expected)


def test_exponentials_are_those_of_the_host() -> None:
    draw = np.random.default_rng(3)
    values = np.concatenate(
        (
            [0.0, -0.0, -708.0, -707.9999999999999, -709.0, -np.inf, -1e300, -5e-324, -1e-17],
            -draw.exponential(10, SIZE - 9),
            -(10.0 ** draw.uniform(-20, 3, 3 * SIZE)),
        )
    )
    expected = np.empty_like(values)
    exponentials(values, expected, len(values))
    results = torch.zeros(len(values), dtype=torch.float64, device=DEVICE)
    _fill_exponentials[(triton.cdiv(len(values), SIZE),)](
        torch.from_numpy(values).to(DEVICE), results, SIZE=SIZE, **jit.NO_FUSION
    )
    np.testing.assert_array_equal(results.cpu().numpy(), expected)
