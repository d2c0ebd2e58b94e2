"""FP8: values and scales of weights and activations, and linear layers of them.

Format: Micikevicius et al., "FP8 Formats for Deep Learning", 2022: e4m3fn has 4 bits of exponent, 3
of mantissa, no infinities; largest 448. Each output channel of a weight, and each row of
activations, has one scale, a power of two: multiplying by it rounds nothing, and since the format
has exponents of its own, finer scales would hardly be more exact.

Two ways to multiply. `scaled_linear` quantises the rows, too, and multiplies in FP8: on a GPU by
its matrix units; elsewhere, as their oracle, in float32. The scales come after the product, since a
GPU multiplies values that have one scale up to twice as fast as rows and channels that have their
own. `widened_linear` widens the weights to the type of the rows, so that activations are not
rounded, as do the decoder's products with groups (`verifier/gpu/groups.py`).

Shape legend: T rows, K inputs, N outputs.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional

from verifier.gpu.groups import Element, GroupedWeight, Offset, WeightForm, packed
from verifier.gpu.weights import (
    DeltaNet,
    GpuWeights,
    GroupedLinear,
    Layer,
    LayerInput,
    Mlp,
    PerLayerInputs,
)

FP8 = torch.float8_e4m3fn
Quantised = tuple[torch.Tensor, torch.Tensor]
"""Values [R, K] FP8 and scales [R, 1] float32."""


class RowOperations(NamedTuple):
    """What is done to rows before a product in FP8 and after it: `quantised` and `rescaled`, or
    others with the same bits.
    """

    quantise: Callable[[torch.Tensor], Quantised]
    rescale: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.dtype], torch.Tensor
    ]


# A row of zeros gets a scale too.
_SMALLEST_ROW = 2.0**-80

# What cuBLAS's and CUTLASS's products of FP8 need of K and N.
_MULTIPLE = 16

_FORM = WeightForm(element=Element.E4M3, group=0, scale=torch.float32, offset=Offset.NONE)

# The bits of an FP8 value, sign extended to 16 and shifted to where another format has its sign,
# exponent and mantissa: (shift, mask of the bits that count, factor that corrects the bias).
_BFLOAT16_BITS = (4, 0x87F0 - (1 << 16), 2.0**120)
_FLOAT16_BITS = (7, 0xBF80 - (1 << 16), 2.0**8)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledLinear:
    """Implements `Linear` by `scaled_linear`."""

    weight: torch.Tensor  # [N, K] FP8
    scale: torch.Tensor  # [N, 1] float32
    bias: torch.Tensor | None = None  # [N], of the model's dtype

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        operations = row_operations_for(rows.device)
        return scaled_linear(rows, self.weight, self.scale, self.bias, operations)


def widening(weights: GpuWeights) -> GpuWeights:
    """The weights of a model that widens its FP8 weights before products."""

    def widened_part(part: Any) -> Any:
        if isinstance(part, ScaledLinear):
            weight = GroupedWeight(
                form=_FORM,
                shape=tuple(part.weight.shape),
                codes=packed(part.weight.view(torch.uint8), Element.E4M3),
                groups=part.scale[None],
            )
            return GroupedLinear(operations=weights.operations, weight=weight, bias=part.bias)
        if not isinstance(part, DeltaNet | Layer | Mlp | LayerInput | PerLayerInputs):
            return part
        names = [field.name for field in dataclasses.fields(part)]
        return dataclasses.replace(
            part, **{name: widened_part(getattr(part, name)) for name in names}
        )

    return dataclasses.replace(
        weights,
        layers=[widened_part(layer) for layer in weights.layers],
        per_layer_inputs=widened_part(weights.per_layer_inputs),
    )


def quantised(rows: torch.Tensor) -> Quantised:
    """The nearest FP8 values of float rows [R, K], and their scales.

    A row's scale is the smallest power of two at which its largest number fits; NaN if the row has
    a number that is not finite, so that it cannot pass for one that has not.
    """
    floats = rows.float()
    largest = floats.abs().amax(dim=1, keepdim=True)
    # By its bits: a GPU's `torch.ldexp` and `torch.pow` are not exact at powers of two. The largest
    # value, 448, is 1.75 * 2^8: with a larger mantissa, the sum carries into the exponent.
    bits = largest.clamp(min=_SMALLEST_ROW).view(torch.int32)
    scale = ((((bits + 0x1FFFFF) >> 23) - 8) << 23).view(torch.float32)
    scale.masked_fill_(~largest.isfinite(), torch.nan)
    return (floats / scale).to(FP8), scale


def widened(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Weight * scale in `dtype`: exact, except for numbers too small for float16.

    Converts the bits, since torch's own conversion takes ten times as long on a CPU.
    """
    shift, mask, factor = _BFLOAT16_BITS if dtype is torch.bfloat16 else _FLOAT16_BITS
    bits = weight.view(torch.int8).to(torch.int16)
    bits = bits.bitwise_left_shift_(shift).bitwise_and_(mask)
    values = bits.view(torch.bfloat16 if dtype is torch.bfloat16 else torch.float16)
    # In one type: mixed types take torch's slow path. A power of two loses no precision.
    return values.to(dtype).mul_((scale * factor).to(dtype))


def widened_linear(
    rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Outputs [..., N] of rows [..., K], in their dtype, with the bits of ordinary weights that
    have the same values.
    """
    return torch.nn.functional.linear(rows, widened(weight, scale, rows.dtype), bias)


def rescaled(
    product: torch.Tensor,
    row_scale: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """A product [T, N] of values, times the scales of rows [T, 1] and of weights [N, 1], plus a
    bias [N]; in float32, rounded once to `dtype`.
    """
    numbers = product.float() * scale.t() * row_scale
    if bias is not None:
        numbers += bias
    return numbers.to(dtype)


TORCH_ROW_OPERATIONS = RowOperations(quantised, rescaled)


def scaled_linear(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    operations: RowOperations,
) -> torch.Tensor:
    """Outputs [..., N] of rows [..., K], in their dtype.

    Products are rounded to bfloat16 whatever the dtype: all versions of torch and all GPUs with FP8
    give that, and it is little beside the rounding of the rows. It holds them without their scales,
    too: at most 448 * 448 * K.
    """
    values, row_scale = operations.quantise(rows.reshape(-1, rows.shape[-1]))
    product = _scaled_mm(values, weight) if _fits(weight) else plain_product(values, weight)
    outputs = operations.rescale(product, row_scale, scale, bias, rows.dtype)
    return outputs.view(*rows.shape[:-1], len(weight))


def plain_product(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[T, N] bfloat16 of values [T, K] and [N, K]: in float32, rounded once."""
    return (values.float() @ weight.float().t()).to(torch.bfloat16)


def _scaled_mm(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product that `plain_product` gives, by the GPU's matrix units, which sum in float32.

    What torch asks for: the left matrix row-major, the right one column-major, a scale of each in
    float32. Without `use_fast_accum`, which sums in fewer bits.
    """
    one = _one(values.device)
    return torch._scaled_mm(
        values,
        weight.t(),
        scale_a=one,
        scale_b=one,
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )


@functools.cache
def _one(device: torch.device) -> torch.Tensor:
    """Kept, so that no step launches a kernel to write it."""
    return torch.ones((), dtype=torch.float32, device=device)


def _fits(weight: torch.Tensor) -> bool:
    return weight.is_cuda and not any(size % _MULTIPLE for size in weight.shape)


def row_operations_for(device: torch.device) -> RowOperations:
    """Triton's on a GPU, each a kernel; torch's elsewhere."""
    if device.type == "cuda":
        from verifier.gpu.kernels.quantisation import quantise_rows, rescale_product

        return RowOperations(quantise_rows, rescale_product)
    return TORCH_ROW_OPERATIONS
