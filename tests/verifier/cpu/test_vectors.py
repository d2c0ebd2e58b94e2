"""Functions of vectors against float64, over the whole range of their arguments."""

import math
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import pytest

from servicekit.kernels.memory import address_of
from verifier.checkpoint.weight_types import Activation
from verifier.cpu.kernels import rows, vectors

FloatArray = npt.NDArray[np.float32]

# The largest x whose exponential the kernels compute, and the least.
LOW, HIGH = np.float32(-87.33), np.float32(88.3)


# Not cached on disk: a change of the verifier's kernels would not be seen.
@numba.njit
def _exp(out: int, x: int, size: int) -> None:
    for offset in range(0, 4 * size, 64):
        vectors.store(out + offset, vectors.exp(vectors.load(x + offset)))


@numba.njit
def _tanh(out: int, x: int, size: int) -> None:
    for offset in range(0, 4 * size, 64):
        vectors.store(out + offset, vectors.tanh(vectors.load(x + offset)))


@numba.njit
def _reduced(x: int) -> tuple[Any, Any]:
    return vectors.sum_of(vectors.load(x)), vectors.largest_of(vectors.load(x))


def applied(function: Any, x: FloatArray) -> FloatArray:
    padded = np.zeros(-(-len(x) // 16) * 16, dtype=np.float32)
    padded[: len(x)] = x
    out = np.empty_like(padded)
    function(address_of(out), address_of(padded), len(padded))
    result: FloatArray = out[: len(x)]
    return result


def numbers() -> FloatArray:
    """Random bits, neighbours of zero and of the borders, and a dense range; no NaN."""
    draw = np.random.default_rng(0)
    bits = draw.integers(1 << 32, size=1 << 20, dtype=np.uint32).view(np.float32)
    dense = np.linspace(-105, 105, 1 << 20, dtype=np.float32)
    special = np.array([0, -0.0, LOW, HIGH, np.inf, -np.inf], dtype=np.float32)
    near = [np.nextafter(special[:4], np.float32(to)) for to in (-np.inf, np.inf)]
    x = np.concatenate((bits, dense, special, *near))
    without_nan: FloatArray = x[~np.isnan(x)]
    return without_nan


def test_exp_is_within_two_units_in_the_last_place() -> None:
    x = numbers()
    result = applied(_exp, x)
    assert (result[x < LOW] == 0).all()
    top = np.exp(np.float64(HIGH))
    assert np.abs(result[x > HIGH] / top - 1).max() < 1e-6
    inside = (x >= LOW) & (x <= HIGH)
    expected = np.exp(x[inside].astype(np.float64))
    units = np.abs(result[inside] - expected) / np.spacing(expected.astype(np.float32))
    assert units.max() < 2
    assert applied(_exp, np.zeros(1, dtype=np.float32))[0] == 1


def test_tanh_is_within_two_ten_millionths() -> None:
    x = numbers()
    result = applied(_tanh, x)
    assert np.abs(result - np.tanh(x.astype(np.float64))).max() < 2e-7
    assert np.abs(result).max() <= 1


@pytest.mark.parametrize("function", [_exp, _tanh])
def test_nan_stays_in_its_lane(function: Any) -> None:
    x = np.arange(16, dtype=np.float32)
    expected = applied(function, x)
    x[5] = np.nan
    result = applied(function, x)
    assert np.isnan(result[5])
    np.testing.assert_array_equal(np.delete(result, 5), np.delete(expected, 5))


def test_sums_combine_neighbours_and_the_largest_is_found_anywhere() -> None:
    x = np.random.default_rng(1).standard_normal(16).astype(np.float32)
    pairs = x
    while len(pairs) > 1:
        pairs = pairs[::2] + pairs[1::2]
    for _ in range(16):
        x = np.roll(x, 1)
        pairs = x
        while len(pairs) > 1:
            pairs = pairs[::2] + pairs[1::2]
        assert _reduced(address_of(x)) == (pairs[0], x.max())


@pytest.mark.parametrize("activation", Activation)
def test_gates_are_the_definitions(activation: Activation) -> None:
    gate = np.concatenate((np.linspace(-120, 120, 1 << 16), np.linspace(-3, 3, 1 << 16)))
    gate = gate.astype(np.float32)
    # Some beyond the limits of those that have any.
    up = (3 * np.random.default_rng(2).standard_normal(len(gate))).astype(np.float32)
    out = np.empty_like(gate)
    rows.gate(address_of(out), address_of(gate), address_of(up), len(gate), int(activation))
    x = gate.astype(np.float64)
    if activation is Activation.SILU:
        expected = x / (1 + np.exp(-x)) * up
    elif activation is Activation.CLAMPED:
        x, up = np.minimum(x, 7), np.clip(up, -7, 7) + 1
        expected = x / (1 + np.exp(-1.702 * x)) * up
        # Not a number stays none, on either side.
        ones, odd = np.ones(16, dtype=np.float32), np.full(16, np.nan, dtype=np.float32)
        for own_gate, own_up in ((ones, odd), (odd, ones)):
            rows.gate(address_of(odd), address_of(own_gate), address_of(own_up), 16, 2)
            assert np.isnan(odd).all()
    else:
        expected = x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) * up
    assert (np.abs(out - expected) <= 5e-7 * np.maximum(np.abs(x * up), 0.1)).all()


@pytest.mark.parametrize("size", [16, 48, 64, 1024])
def test_norms_are_the_definition_in_place_too(size: int) -> None:
    draw = np.random.default_rng(size)
    x, weight = draw.standard_normal((2, size)).astype(np.float32)
    exact = x.astype(np.float64)
    expected = exact / np.sqrt((exact**2).mean() + 1e-6) * weight
    out = np.full(size + 16, 7, dtype=np.float32)
    eps = np.float32(1e-6)
    rows.norm(address_of(out), address_of(x), address_of(weight), size, eps)
    np.testing.assert_allclose(out[:size], expected, rtol=1e-6)
    assert (out[size:] == 7).all()
    rows.norm(address_of(x), address_of(x), address_of(weight), size, eps)
    np.testing.assert_array_equal(x, out[:size])
