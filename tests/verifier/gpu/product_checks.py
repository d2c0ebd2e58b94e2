"""Checks of the product of `--numerics strict`, on a GPU or in Triton's interpreter.

Run in the interpreter by `test_in_the_interpreter.py`, on a GPU by `tests/gpu/test_strict.py`. The
interpreter adds up 16 of a tile's inputs at a time, in their order (`triton_interpreter.py`): which
numbers meet in a sum, and in how many parts, shows there; how a tensor core adds them, on a GPU
only.
"""

import random
from collections.abc import Callable

import pytest
import torch

from tests.verifier.triton.triton_interpreter import interpreted_cases
from verifier.gpu.groups import CODE_BLOCK, GroupedWeight
from verifier.gpu.kernels.operations import TritonOperations
from verifier.gpu.kernels.product import (
    FEW_ROWS,
    GROUPED_TILES,
    PRODUCT_TILES,
    ProductTile,
    tile_for,
)
from verifier.gpu.operations import operations_for

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
# The interpreter's bfloat16 is not a GPU's.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * HAS_GPU
# On a GPU, with as many stages as it has room for.
STRICT, FAST = (
    operations_for(DEVICE, is_strict=is_strict)
    if HAS_GPU
    else TritonOperations(is_strict=is_strict)
    for is_strict in (True, False)
)
# Inputs and outputs: less than a tile, ragged ones, whole ones.
SHAPES = [(16, 16), (40, 97), (64, 128), (200, 130), (272, 1)]
# Numbers of rows: around the ends of all tiles.
COUNTS = interpreted_cases(
    [1, 2, 15, 16, 17, 32, 33, 64, 65, 128, 131], [*range(1, 34), 63, 64, 65, 127, 128, 129, 300]
)
NUM_ROWS = COUNTS[-1]
if HAS_GPU:
    SHAPES += [(1024, 6144), (3072, 1024), (14336, 4096)]


def numbers(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "num_rows", interpreted_cases([0, 1, 17, 40, 140], [0, 1, 16, 17, 40, 140])
)
def test_is_the_product_of_float64_rounded_once(
    num_rows: int, shape: tuple[int, int], has_bias: bool, dtype: torch.dtype
) -> None:
    num_inputs, num_outputs = shape
    rows = numbers(num_rows, num_inputs, seed=1, dtype=dtype)
    weight = numbers(num_outputs, num_inputs, seed=2, dtype=dtype)
    bias = 8 * numbers(num_outputs, seed=3, dtype=dtype) if has_bias else None
    got = STRICT.linear(rows, weight, bias)
    assert (got.dtype, got.shape) == (dtype, (num_rows, num_outputs))
    check_rounding(got, rows, weight, bias)


def check_rounding(
    got: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    exact = rows.double() @ weight.double().T
    terms = rows.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, terms = exact + bias.double(), terms + bias.double().abs()
    # Of each sum's roundings in float32, and of the one at the end.
    allowed = rows.shape[1] * 2.0**-23 * terms + torch.finfo(rows.dtype).eps * exact.abs()
    assert ((got.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_fast_products_are_torchs_but_for_few_rows_of_16_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    linear = torch.nn.functional.linear

    def recorded(
        rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        asked.append(len(rows))
        return linear(rows, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", recorded)
    rows = numbers(FEW_ROWS + 1, 72, seed=1, dtype=dtype)
    weight = numbers(80, 72, seed=2, dtype=dtype)
    for count in (1, FEW_ROWS, FEW_ROWS + 1):
        got, strict = (each.linear(rows[:count], weight) for each in (FAST, STRICT))
        torch.testing.assert_close(got, strict, rtol=1e-2, atol=1e-2)
    is_short = dtype is not torch.float32
    assert asked == ([FEW_ROWS + 1] if is_short else [1, FEW_ROWS, FEW_ROWS + 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", interpreted_cases(SHAPES[1:2], SHAPES))
def test_bits_of_a_row_do_not_depend_on_the_batch(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Any number of rows, any of them, at any place; by all tiles."""
    num_inputs, num_outputs = shape
    rows = numbers(NUM_ROWS, num_inputs, seed=1, dtype=dtype)
    weight = numbers(num_outputs, num_inputs, seed=2, dtype=dtype)
    bias = numbers(num_outputs, seed=3, dtype=dtype)
    check_bits(lambda some: STRICT.linear(some, weight, bias), rows, PRODUCT_TILES[dtype])


def check_bits(
    multiply: Callable[[torch.Tensor], torch.Tensor],
    rows: torch.Tensor,
    tiles: tuple[ProductTile, ...],
) -> None:
    """Against those of each row by itself."""
    expected = torch.cat([multiply(row[None]) for row in rows])
    # What could not differ would show nothing.
    assert len(expected.unique(dim=0)) > NUM_ROWS / 2
    assert {tile_for(count, tiles) for count in COUNTS} == set(tiles)
    draw = random.Random(4)
    for count in COUNTS:
        chosen = torch.tensor(draw.sample(range(NUM_ROWS), count), device=DEVICE)
        assert torch.equal(multiply(rows[chosen]), expected[chosen]), count
        start = draw.randint(0, NUM_ROWS - count)
        part = slice(start, start + count)
        assert torch.equal(multiply(rows[part]), expected[part]), count


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_lies_behind_rows_weights_and_bias_is_not_seen() -> None:
    """Memory after the last row, the last output and a row's last input."""
    num_rows, num_inputs, num_outputs = 5, 40, 70
    rows = numbers(num_rows + 20, num_inputs, seed=1, dtype=torch.float32)
    weight = numbers(num_outputs + 90, num_inputs, seed=2, dtype=torch.float32)
    bias = numbers(num_outputs + 90, seed=3, dtype=torch.float32)
    expected = STRICT.linear(rows[:num_rows].clone(), weight[:num_outputs].clone(), bias[:70])
    for tensor, end in ((rows, num_rows), (weight, num_outputs), (bias, num_outputs)):
        tensor[end:] = torch.nan
    got = STRICT.linear(rows[:num_rows], weight[:num_outputs], bias[:num_outputs])
    assert torch.equal(got, expected)


def grouped(
    num_inputs: int, num_outputs: int, *, size: int, dtype: torch.dtype, has_minima: bool
) -> GroupedWeight:
    """Random codes, and zeros or minima."""
    generator = torch.Generator().manual_seed(5)
    num_bytes = -(-num_inputs // CODE_BLOCK) * CODE_BLOCK // 2
    codes = torch.randint(256, (num_outputs, num_bytes), generator=generator).to(torch.uint8)
    pairs = torch.rand((num_inputs // size, num_outputs, 2), generator=generator) / 8
    if not has_minima:
        pairs[..., 1] = torch.randint(17, pairs.shape[:2], generator=generator)
    return GroupedWeight(
        num_inputs=num_inputs,
        codes=codes.to(DEVICE),
        groups=pairs.to(dtype).to(DEVICE),
        has_minima=has_minima,
    )


SHORT_DTYPES = [dtype for dtype in DTYPES if dtype is not torch.float32]
GROUPED_SHAPES = [(32, 97, 32), (320, 64, 32), (192, 130, 64), (384, 3, 128)]
"""Inputs, outputs, inputs of a group: of less than a block, of cut ones, of whole ones."""
if HAS_GPU:
    GROUPED_SHAPES += [(4096, 6144, 128), (14336, 4096, 32)]


@pytest.mark.parametrize("has_minima", [False, True])
@pytest.mark.parametrize("group_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", SHORT_DTYPES)
@pytest.mark.parametrize("shape", GROUPED_SHAPES)
@pytest.mark.parametrize("num_rows", [0, 1, 17, 40, 140])
def test_a_product_with_groups_is_that_of_the_widened_weight(
    num_rows: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    group_dtype: torch.dtype,
    has_minima: bool,
) -> None:
    num_inputs, num_outputs, size = shape
    weight = grouped(num_inputs, num_outputs, size=size, dtype=group_dtype, has_minima=has_minima)
    rows = numbers(num_rows, num_inputs, seed=1, dtype=dtype)
    bias = 8 * numbers(num_outputs, seed=3, dtype=dtype) if num_rows > 1 else None
    got = FAST.grouped_linear(rows, weight, bias)
    assert (got.dtype, got.shape) == (dtype, (num_rows, num_outputs))
    check_rounding(got, rows, weight.widened(dtype), bias)


@pytest.mark.parametrize("operations", [STRICT, FAST])
@pytest.mark.parametrize("dtype", SHORT_DTYPES)
@pytest.mark.parametrize("shape", interpreted_cases(GROUPED_SHAPES[1:2], GROUPED_SHAPES))
def test_bits_of_a_row_do_not_depend_on_the_batch_where_weights_are_in_groups(
    shape: tuple[int, int, int], dtype: torch.dtype, operations: TritonOperations
) -> None:
    num_inputs, num_outputs, size = shape
    weight = grouped(num_inputs, num_outputs, size=size, dtype=torch.float16, has_minima=False)
    rows = numbers(NUM_ROWS, num_inputs, seed=1, dtype=dtype)
    check_bits(lambda some: operations.grouped_linear(some, weight), rows, GROUPED_TILES)
