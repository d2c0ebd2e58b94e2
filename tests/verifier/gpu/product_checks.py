"""Checks of the product of `--numerics strict`, on a GPU or in Triton's interpreter.

Run in the interpreter by `test_in_the_interpreter.py`, on a GPU by `tests/gpu/test_strict.py`. The
interpreter adds up 16 of a tile's inputs at a time, in their order (`triton_interpreter.py`): which
numbers meet in a sum, and in how many parts, shows there; how a tensor core adds them, on a GPU
only.
"""

import random
from collections.abc import Callable

import numpy
import pytest
import torch

from tests.verifier.gpu.weight_forms import FORMS, grouped
from tests.verifier.triton.triton_interpreter import interpreted_cases
from verifier.checkpoint.group_formats import FORMATS, GroupedRows
from verifier.gpu.groups import GroupedWeight
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


SHORT_DTYPES = [dtype for dtype in DTYPES if dtype is not torch.float32]


def shapes_of(name: str) -> list[tuple[int, int]]:
    """Inputs and outputs: of less than a block, of cut ones, of whole ones."""
    group = FORMS[name].group or 48
    return [(group, 97), (3 * group, 130), (512, 3), *([(14336, 4096)] * HAS_GPU)]


@pytest.mark.parametrize("dtype", SHORT_DTYPES)
@pytest.mark.parametrize("num_rows", interpreted_cases([0, 17, 140], [0, 1, 17, 40, 140]))
@pytest.mark.parametrize(
    ("name", "shape"), [(name, shape) for name in FORMS for shape in shapes_of(name)]
)
def test_a_product_with_groups_is_that_of_the_widened_weight(
    name: str, shape: tuple[int, int], num_rows: int, dtype: torch.dtype
) -> None:
    num_inputs, num_outputs = shape
    weight = grouped(name, num_outputs, num_inputs, device=DEVICE)
    rows = numbers(num_rows, num_inputs, seed=1, dtype=dtype)
    bias = 8 * numbers(num_outputs, seed=3, dtype=dtype) if num_rows > 17 else None
    got = FAST.grouped_linear(rows, weight, bias)
    assert (got.dtype, got.shape) == (dtype, (num_rows, num_outputs))
    check_rounding(got, rows, weight.widened(dtype), bias)


def test_of_float32_rows_the_weight_is_widened_first() -> None:
    weight = grouped("fp8_blocks", 70, 256, device=DEVICE)
    rows = numbers(5, 256, seed=1, dtype=torch.float32)
    expected = STRICT.linear(rows, weight.widened(torch.float32))
    assert torch.equal(STRICT.grouped_linear(rows, weight), expected)


def test_a_code_of_fp8_that_is_no_number_makes_its_output_none() -> None:
    weight = GroupedWeight.empty(FORMS["fp8_blocks"], (3, 256), device=DEVICE)
    codes = numpy.full((3, 256), 0x38, dtype=numpy.uint8)
    codes[1, 130] = 0xFF
    factors = numpy.ones((3, 8), dtype=numpy.float32)
    weight.fill(0, GroupedRows(codes=codes, factors=factors), FORMATS["FP8"])
    rows = numbers(2, 256, seed=1, dtype=torch.float16)
    got = STRICT.grouped_linear(rows, weight)
    assert got.isnan().tolist() == [[False, True, False]] * 2
    assert weight.widened(torch.float16).isnan().any(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", SHORT_DTYPES)
@pytest.mark.parametrize(
    ("name", "operations"),
    interpreted_cases(
        [("int4", STRICT), ("fp8_blocks", FAST)],
        [(name, operations) for name in FORMS for operations in (STRICT, FAST)],
    ),
)
def test_bits_of_a_row_do_not_depend_on_the_batch_where_weights_are_in_groups(
    name: str, operations: TritonOperations, dtype: torch.dtype
) -> None:
    num_inputs, num_outputs = shapes_of(name)[-1] if HAS_GPU else (384, 64)
    weight = grouped(name, num_outputs, num_inputs, device=DEVICE)
    rows = numbers(NUM_ROWS, num_inputs, seed=1, dtype=dtype)
    check_bits(lambda some: operations.grouped_linear(some, weight), rows, GROUPED_TILES)
