"""FP8 weights: linear layers whose weights are held in float8_e4m3fn, a byte each.

Weight-only: weights are widened to the model's dtype at every use, so activations are not rounded,
and a product has the same bits as with ordinary weights of the same values. One
scale per output channel, a power of two: multiplying by it rounds nothing, and since the format has
exponents of its own, finer scales would hardly be more exact.

Embeddings, the output layer and norms keep their dtype. Format: Micikevicius et al., "FP8 Formats
for Deep Learning", 2022: e4m3fn has 4 bits of exponent, 3 of mantissa, no infinities; largest 448.
"""

import torch
import torch.nn.functional
from transformers import PreTrainedModel

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
# A channel of zeros gets a scale too.
_SMALLEST_CHANNEL = 2.0**-80

# The bits of an FP8 value, sign extended to 16 and shifted to where another format has its sign,
# exponent and mantissa: (shift, mask of the bits that count, factor that corrects the bias).
_BFLOAT16_BITS = (4, 0x87F0 - (1 << 16), 2.0**120)
_FLOAT16_BITS = (7, 0xBF80 - (1 << 16), 2.0**8)


class Fp8Linear(torch.nn.Module):
    """A linear layer. Weight [out_features, in_features] FP8, scale [out_features, 1] float32."""

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        weight, scale = quantised(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        weight = widened(self.weight, self.scale, rows.dtype)
        return torch.nn.functional.linear(rows, weight, self.bias)


def quantise_linear_layers(model: PreTrainedModel, device: torch.device) -> int:
    """Replaces the model's linear layers, except the output layer. Returns how many.

    The new layers are on the device, one after the other: memory elsewhere is that of one.
    """
    kept = model.get_output_embeddings()
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not kept
    ]
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, torch.nn.Linear)
        model.set_submodule(name, Fp8Linear(linear).to(device))
    return len(names)


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest FP8 weights [out, in] and the scales [out, 1] float32 of a float weight.

    A channel's scale is the smallest power of two at which its largest weight fits.
    """
    rows = weight.float()
    largest = rows.abs().amax(dim=1, keepdim=True).clamp_(min=_SMALLEST_CHANNEL)
    # frexp: x = mantissa * 2 ** exponent with mantissa in [0.5, 1); exact at powers of two.
    mantissa, exponent = torch.frexp(largest / _LARGEST)
    scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    return (rows / scale).to(FP8), scale


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
