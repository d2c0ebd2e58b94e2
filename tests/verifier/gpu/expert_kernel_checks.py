"""Checks of the kernels of experts and of FP8 rows against plain torch.

Run in Triton's interpreter by `test_expert_kernels.py`, on a GPU by
`tests/gpu/test_expert_kernels.py`.
"""

from typing import Any

import pytest
import torch

from tests.verifier.gpu.kernel_checks import DEVICE, TOLERANCES, numbers
from tests.verifier.gpu.weight_forms import FORMS, grouped
from tests.verifier.triton.triton_interpreter import interpreted_cases
from verifier.checkpoint.weight_types import Activation
from verifier.gpu.fp8 import FP8, quantised, rescaled
from verifier.gpu.kernels.experts import find_tiles_kernel
from verifier.gpu.kernels.mixture import TILE, max_num_tiles, mix
from verifier.gpu.kernels.quantisation import quantise_rows, rescale_product
from verifier.gpu.layers.experts import plain_mixture
from verifier.gpu.weights import ExpertWeights

ON_GPU = DEVICE.type == "cuda"
# The interpreter's bfloat16 is not a GPU's.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU
HIDDEN, SIZE = 48, 80  # neither fills its tiles


def routing(kind: str, num_tokens: int, num_experts: int, per_token: int) -> torch.Tensor:
    """[T, J] int64, different experts of each token."""
    if kind == "random":
        generator = torch.Generator().manual_seed(num_tokens)
        order = torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)
    elif kind == "one":  # the same ones for every token; most have none
        order = torch.arange(num_experts).roll(-2).expand(num_tokens, -1)
    else:  # "ends": the first and the last
        order = torch.arange(num_experts).roll(1).expand(num_tokens, -1)
    return order[:, :per_token].contiguous().to(DEVICE)


def problem(
    kind: str,
    num_tokens: int,
    *,
    num_experts: int = 6,
    per_token: int = 2,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, ExpertWeights]:
    """What `Mixture` takes, but for the activation."""
    return (
        numbers(num_tokens, HIDDEN, seed=1, dtype=dtype),
        routing(kind, num_tokens, num_experts, per_token),
        numbers(num_tokens, per_token, seed=2).softmax(dim=-1),
        ExpertWeights(
            gate_up=(numbers(num_experts, 2 * SIZE, HIDDEN, seed=3) / HIDDEN**0.5).to(dtype),
            down=(numbers(num_experts, HIDDEN, SIZE, seed=4) / SIZE**0.5).to(dtype),
        ),
    )


def expected_mixture(
    rows: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    experts: ExpertWeights,
    activation: Activation,
) -> torch.Tensor:
    """By plain torch in float32, rounded once."""

    def wide(each: Any) -> Any:
        return each.float() if isinstance(each, torch.Tensor) else each

    own = ExpertWeights(
        gate_up=wide(experts.gate_up),
        down=wide(experts.down),
        gate_up_bias=wide(experts.gate_up_bias),
        down_bias=wide(experts.down_bias),
    )
    return plain_mixture(rows.float(), chosen, weights, own, activation).to(rows.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "num_tokens", "num_experts", "per_token"),
    [
        ("random", 0, 6, 2),
        ("random", 1, 6, 2),
        ("random", 7, 6, 2),
        ("random", 150, 3, 1),  # several tiles of an expert, ragged ends
        ("random", 40, 20, 8),
        ("one", 1, 6, 1),
        ("one", TILE, 6, 2),
        ("one", 2 * TILE + 1, 6, 2),
        ("ends", 5, 8, 2),
        ("random", 9, 4, 4),  # every expert of every token
        ("random", 3, 1, 1),
    ],
)
def test_mixture(
    kind: str, num_tokens: int, num_experts: int, per_token: int, dtype: torch.dtype
) -> None:
    given = problem(kind, num_tokens, num_experts=num_experts, per_token=per_token, dtype=dtype)
    got = mix(*given, Activation.SILU)
    assert got.dtype is dtype
    expected = expected_mixture(*given, Activation.SILU)
    torch.testing.assert_close(got, expected, **TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "form", interpreted_cases([None, "int4", "fp8_blocks", "mxfp4"], [None, *FORMS])
)
def test_experts_with_biases_and_clamped_gates(form: str | None, dtype: torch.dtype) -> None:
    """Inputs of a block of codes and a part of another; of a part of one. Plain, or in groups."""
    hidden, size, num_experts, num_tokens = 160, 96, 3, 70
    if form and FORMS[form].group > 32:
        hidden, size = 256, 128

    def weight(*shape: int, seed: int) -> Any:
        if form:
            return grouped(form, num_experts, *shape, device=DEVICE, seed=seed)
        # As of codes, the root of the mean square is some 0.4.
        return (0.4 * numbers(num_experts, *shape, seed=seed)).to(dtype)

    given = (
        (0.3 * numbers(num_tokens, hidden, seed=1)).to(dtype),
        routing("random", num_tokens, num_experts, 2),
        numbers(num_tokens, 2, seed=2).softmax(dim=-1),
        ExpertWeights(
            gate_up=weight(2 * size, hidden, seed=3),
            down=weight(hidden, size, seed=4),
            gate_up_bias=6 * numbers(num_experts, 2 * size, seed=5, dtype=dtype),
            down_bias=4 * numbers(num_experts, hidden, seed=6, dtype=dtype),
        ),
    )
    got = mix(*given, Activation.CLAMPED)
    expected = expected_mixture(*given, Activation.CLAMPED)
    # Clamped products are some tens.
    tolerance = TOLERANCES[dtype]["rtol"] * expected.abs().max().item()
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
    rows, chosen, weights, experts = given
    some = mix(rows[:3], chosen[:3], weights[:3], experts, Activation.CLAMPED)
    assert torch.equal(some, got[:3])


def test_gates_that_are_not_finite_are_not_clamped() -> None:
    rows, chosen, weights, experts = problem("one", 2)
    rows[1] = float("nan")
    mixed = mix(rows, chosen, weights, experts, Activation.CLAMPED)
    assert mixed[0].isfinite().all()
    assert mixed[1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tokens_bits_do_not_depend_on_the_others(dtype: torch.dtype) -> None:
    """Alone; with others at its experts, before and behind it, in other tiles; in another order."""
    given = problem("random", 100, num_experts=3, dtype=dtype)
    rows, chosen, weights, experts = given
    all_of_them = mix(*given, Activation.SILU)
    for tokens in ([17], [99, 17], list(range(99, -1, -1)), [17] * 65):
        some = mix(rows[tokens], chosen[tokens], weights[tokens], experts, Activation.SILU)
        assert torch.equal(some, all_of_them[tokens])


@pytest.mark.parametrize("num_experts", [1, 5, 128])
@pytest.mark.parametrize("num_pairs", [1, 2, 15, 16, 17, 130])
def test_tiles_of_sorted_pairs(num_pairs: int, num_experts: int) -> None:
    """Against counting on the host: random experts, then all pairs of the first and last one."""
    generator = torch.Generator().manual_seed(num_pairs)
    random = torch.randint(num_experts, (num_pairs,), generator=generator).sort()[0]
    first = torch.zeros(num_pairs, dtype=torch.int64)
    tile_size = 16
    num_tiles = (num_pairs + min(num_pairs, num_experts) * (tile_size - 1)) // tile_size
    for experts in (random, first, first + num_experts - 1):
        tiles = torch.full((num_tiles, 3), -1, dtype=torch.int32, device=DEVICE)
        find_tiles_kernel[(1,)](
            experts.to(DEVICE),
            tiles,
            num_pairs,
            num_tiles,
            num_pairs.bit_length(),
            TILE=tile_size,
            EXPERTS=1 << (num_experts - 1).bit_length(),
            CHUNK=4,
        )
        expected, start = [], 0
        for expert, count in enumerate(experts.bincount(minlength=num_experts).tolist()):
            end = start + count
            for row in range(start, end, tile_size):
                expected.append([expert, row, min(row + tile_size, end)])
            start = end
        assert len(expected) <= num_tiles
        expected += [[0, 0, 0]] * (num_tiles - len(expected))
        assert tiles.tolist() == expected


@pytest.mark.parametrize("num_experts", [1, 2, 7, 128])
def test_the_bound_of_tiles_is_the_worst_case(num_experts: int) -> None:
    for num_pairs in (1, 2, 63, 64, 65, 128, 129, 700):
        # All experts but one have a single pair more than full tiles.
        most, left = 0, num_pairs
        for _ in range(min(num_experts, num_pairs)):
            most, left = most + 1, left - 1
        most += left // TILE
        assert most <= max_num_tiles(num_pairs, num_experts)
        assert max_num_tiles(num_pairs, num_experts) == most


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 64), (1, 16), (5, 40), (4, 2048), (3, 5000)])
def test_quantised_rows_have_the_bits_of_torch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows = numbers(*shape, seed=1)
    if len(rows):
        rows *= torch.logspace(-3, 2, len(rows), device=DEVICE)[:, None]
    rows = rows.to(dtype)
    values, scale = quantise_rows(rows)
    expected, expected_scale = quantised(rows)
    assert (values.dtype, values.shape, scale.shape) == (FP8, shape, (shape[0], 1))
    assert torch.equal(scale, expected_scale)
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))


def test_every_largest_number_has_torchs_scale() -> None:
    edges = torch.tensor([448.0, 1.75, 0.4375, 1.0, 3.5e38 / 2, 2.0**-70, 0.0])
    around = torch.stack((edges, edges.nextafter(edges * 0), edges.nextafter(edges * 0 + 3e38)))
    rows = around.reshape(-1, 1).to(DEVICE) * torch.tensor([1.0, -0.3, 0.01, 0.0], device=DEVICE)
    values, scale = quantise_rows(rows)
    expected, expected_scale = quantised(rows)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("quantise", [quantise_rows, quantised])
def test_a_row_that_is_not_finite_is_nan(quantise: Any, bad: float) -> None:
    rows = numbers(3, 24, seed=1)
    sound, sound_scale = quantise(rows)
    rows[1, 7] = bad
    values, scale = quantise(rows)
    assert (values.float() * scale)[1].isnan().all()
    for row in (0, 2):
        assert torch.equal(values[row].float(), sound[row].float())
        assert torch.equal(scale[row], sound_scale[row])


def powers_of_two(count: int, low: int, high: int) -> torch.Tensor:
    """[count, 1] float32."""
    exponents = torch.randint(low, high, (count, 1), dtype=torch.int32)
    return ((exponents + 127) << 23).view(torch.float32).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(0, 16), (1, 1), (3, 1024), (5, 2500)])
def test_rescaled_products_have_the_bits_of_torch(
    shape: tuple[int, int], has_bias: bool, dtype: torch.dtype
) -> None:
    num_rows, size = shape
    product = (1000 * numbers(*shape, seed=1)).bfloat16()
    row_scale, scale = powers_of_two(num_rows, -20, 0), powers_of_two(size, -10, 2)
    bias = numbers(size, seed=2).to(dtype) if has_bias else None
    if num_rows > 1:
        row_scale[1] = torch.nan
    got = rescale_product(product, row_scale, scale, bias, dtype)
    expected = rescaled(product, row_scale, scale, bias, dtype)
    assert (got.dtype, got.shape) == (dtype, shape)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert not got[2:].isnan().any()
