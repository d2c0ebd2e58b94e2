"""Checks of the product of `--numerics strict`, on a GPU or in Triton's interpreter.

Run in the interpreter by `test_in_the_interpreter.py`, on a GPU by `tests/gpu/test_strict.py`. The
interpreter adds up 16 of a tile's inputs at a time, in their order (`triton_interpreter.py`): which
numbers meet in a sum, and in how many parts, shows there; how a tensor core adds them, on a GPU
only.
"""

import random

import pytest
import torch

from tests.verifier.triton_interpreter import interpreted_cases
from verifier.gpu.kernels.operations import TritonOperations
from verifier.gpu.kernels.product import FEW_ROWS, PRODUCT_TILES, tile_for
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
    exact = rows.double() @ weight.double().T
    terms = rows.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, terms = exact + bias.double(), terms + bias.double().abs()
    # Of each sum's roundings in float32, and of the one at the end.
    allowed = num_inputs * 2.0**-23 * terms + torch.finfo(dtype).eps * exact.abs()
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


def alone(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Each row's product, computed by itself."""
    return torch.cat([STRICT.linear(row[None], weight, bias) for row in rows])


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
    expected = alone(rows, weight, bias)
    # What could not differ would show nothing.
    assert len(expected.unique(dim=0)) > NUM_ROWS / 2
    assert {tile_for(count, dtype) for count in COUNTS} == set(PRODUCT_TILES[dtype])
    draw = random.Random(4)
    for count in COUNTS:
        chosen = torch.tensor(draw.sample(range(NUM_ROWS), count), device=DEVICE)
        assert torch.equal(STRICT.linear(rows[chosen], weight, bias), expected[chosen]), count
        start = draw.randint(0, NUM_ROWS - count)
        part = slice(start, start + count)
        assert torch.equal(STRICT.linear(rows[part], weight, bias), expected[part]), count


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
