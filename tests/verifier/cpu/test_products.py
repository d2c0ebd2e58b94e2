"""Products against a chain of fused multiply-adds, bit by bit, for every type of weights."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from servicekit.kernels.memory import address_of
from tests.verifier.cpu.numpy_decoder import Array, values
from tests.volume import cases
from verifier.checkpoint.weight_types import LANES, FloatArray, WeightType
from verifier.cpu.decoder import LARGEST_KV
from verifier.cpu.kernels.products import finish, multiply
from verifier.cpu.kernels.rows import write_kv
from verifier.cpu.kernels.tiles import FP8_FACTOR

# Depths of more than 256 are added up piece by piece.
MAX_ROWS, MAX_BLOCKS, MAX_DEPTH = 40, 19, cases(336, 640)


def some_weights(weight_type: WeightType, draw: np.random.Generator) -> Array:
    """Packed weights [MAX_BLOCKS, MAX_DEPTH, 16], of all magnitudes and signs, none NaN."""
    shape = (MAX_BLOCKS, MAX_DEPTH, LANES)
    floats = draw.standard_normal(shape) * 2.0 ** draw.integers(-20, 3, size=shape)
    match weight_type:
        case WeightType.BFLOAT16:
            return (floats.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        case WeightType.FLOAT16:
            return floats.astype(np.float16).view(np.int16)
        case WeightType.FP8:
            codes = draw.integers(256, size=shape, dtype=np.uint8)
            return np.where(codes & 0x7F == 0x7F, np.uint8(0), codes)
    return floats.astype(np.float32)


def chains(x: FloatArray, weights: Array, depths: Iterable[int]) -> dict[int, FloatArray]:
    """[rows, blocks * 16] by depth: each output's chain, rounded to float32 once a step.

    x * w is exact in a long double, and the sum is so nearly that it rounds to the same float32.
    """
    wide = np.longdouble
    columns = np.moveaxis(weights, 1, 0).reshape(weights.shape[1], -1).astype(wide)
    total = np.zeros((len(x), columns.shape[1]), dtype=np.float32)
    found = {}
    for k, column in enumerate(columns):
        total = (x[:, k : k + 1].astype(wide) * column + total).astype(np.float32)
        if k + 1 in depths:
            found[k + 1] = total
    return found


@pytest.mark.parametrize(
    "weight_type",
    # Of weights in groups, `test_groups` has the products.
    [each for each in WeightType if each is not WeightType.GROUPS],
    ids=lambda each: each.name.lower(),
)
def test_outputs_are_chains_in_order(weight_type: WeightType) -> None:
    draw = np.random.default_rng(3)
    blocks = some_weights(weight_type, draw)
    exact = values(blocks, weight_type)
    if weight_type is WeightType.FP8:
        exact = exact / FP8_FACTOR
    x = draw.standard_normal((MAX_ROWS, MAX_DEPTH + 16)).astype(np.float32)
    marker = np.empty(0, dtype=weight_type.value)
    rows_by_depth = {16: (1, 2, 40), 256: (1, 13), MAX_DEPTH: range(1, MAX_ROWS + 1)}
    chain = chains(x, exact, rows_by_depth)
    for depth, all_rows in rows_by_depth.items():
        own = np.ascontiguousarray(blocks[:, :depth])
        expected = chain[depth]
        for num_rows in all_rows:
            first = int(draw.integers(MAX_BLOCKS))
            end = int(draw.integers(first, MAX_BLOCKS)) + 1
            first_row = int(draw.integers(MAX_ROWS - num_rows + 1))
            out = np.full((MAX_ROWS + 1, MAX_BLOCKS * LANES + 32), 7, dtype=np.float32)
            multiply(
                marker, address_of(x) + first_row * x.strides[0], x.strides[0], 0, num_rows,
                address_of(own), depth, first, end, address_of(out), out.strides[0],
            )  # fmt: skip
            columns = slice(LANES * first, LANES * end)
            np.testing.assert_array_equal(
                out[:num_rows, columns], expected[first_row : first_row + num_rows, columns]
            )
            out[:num_rows, columns] = 7
            assert (out == 7).all(), "written outside"


def test_no_rows_and_no_blocks_write_nothing() -> None:
    x, out = np.ones((2, 16), dtype=np.float32), np.full((2, 16), 7, dtype=np.float32)
    weights = np.ones((1, 16, 16), dtype=np.float32)
    for num_rows, end in ((0, 1), (2, 0)):
        multiply(
            np.empty(0, dtype=np.float32), address_of(x), 64, 0, num_rows, address_of(weights),
            16, 0, end, address_of(out), 64,
        )  # fmt: skip
    assert (out == 7).all()


@pytest.mark.parametrize(("has_scales", "has_bias"), [(True, False), (False, True), (True, True)])
def test_scales_come_before_the_bias(has_scales: bool, has_bias: bool) -> None:
    draw = np.random.default_rng(4)
    y = draw.standard_normal((3, 96)).astype(np.float32)
    scales, bias = draw.standard_normal((2, 96)).astype(np.float32)
    expected = y.copy()
    if has_scales:
        expected[:, 16:64] *= scales[16:64]
    if has_bias:
        expected[:, 16:64] += bias[16:64]
    finish(
        address_of(y), y.strides[0], 3, 1, 4, address_of(scales) if has_scales else 0,
        address_of(bias) if has_bias else 0,
    )  # fmt: skip
    np.testing.assert_array_equal(y, expected)


def _numbers(limit: float) -> FloatArray:
    """Random bits, values of all magnitudes, exact ties, and what is next to the limit."""
    draw = np.random.default_rng(5)
    bits = draw.integers(1 << 32, size=1 << 17, dtype=np.uint32)
    ties = (bits[: 1 << 12] & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    half_ties = (bits[: 1 << 12] & np.uint32(0xFFFFE000)) | np.uint32(0x1000)
    small = draw.standard_normal(1 << 17) * 10.0 ** draw.uniform(-9, 6, size=1 << 17)
    small = small.astype(np.float32)
    x = np.concatenate(
        (bits.view(np.float32), ties.view(np.float32), half_ties.view(np.float32), small)
    )
    near = [np.float32(limit)]
    for _ in range(20):
        near.append(np.nextafter(near[-1], np.float32(0)))
    with np.errstate(over="ignore"):
        near.append(np.nextafter(near[0], np.float32(np.inf)))
    near.append(np.float32(np.inf))
    ends = np.array([*near, *(-each for each in near), np.nan], dtype=np.float32)
    x = np.concatenate((x, ends))
    return np.resize(x, -(-len(x) // LANES) * LANES)


@pytest.mark.parametrize(
    ("weight_type", "dtype"),
    [
        (WeightType.FLOAT32, torch.float32),
        (WeightType.BFLOAT16, torch.bfloat16),
        (WeightType.FLOAT16, torch.float16),
    ],
    ids=["float32", "bfloat16", "float16"],
)
def test_keys_and_values_are_rounded_as_torch_does(
    weight_type: WeightType, dtype: torch.dtype
) -> None:
    """What is not finite then is stored as zero, and told."""
    limit = LARGEST_KV[weight_type]
    x = _numbers(limit)
    rounded = torch.from_numpy(x).to(dtype).double().numpy()
    expected = np.where(np.isfinite(rounded), rounded, 0.0)
    marker = np.empty(0, dtype=weight_type.value)
    keys: npt.NDArray[np.generic] = np.zeros((len(x), 16), dtype=weight_type.value)
    own_values = np.zeros((len(x) // 16, 16, 16), dtype=weight_type.value)
    offset = 11
    places = (address_of(keys), address_of(own_values), offset)
    write_kv(marker, *places, address_of(x), address_of(x), len(x), np.float32(limit))
    np.testing.assert_array_equal(values(keys, weight_type)[:, offset], expected)
    stored = values(own_values, weight_type)
    np.testing.assert_array_equal(stored[:, offset].reshape(-1), expected)
    others = np.delete(np.arange(16), offset)
    assert not keys[:, others].any()
    assert not own_values[:, others].any()
    # One row for each number: is it finite?
    zeros = np.zeros(16, dtype=np.float32)
    for number, value in zip(x[-60:], rounded[-60:], strict=True):
        row = zeros.copy()
        row[3] = number
        for key, own in ((row, zeros), (zeros, row)):
            is_finite = write_kv(
                marker, *places, address_of(key), address_of(own), 16, np.float32(limit)
            )
            assert is_finite == np.isfinite(value)
