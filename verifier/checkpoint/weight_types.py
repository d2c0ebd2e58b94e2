"""What a checkpoint's numbers are, and what its configuration names: types of weights, activations,
rotary embeddings.
"""

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
# Of a type that holds the bits of a `WeightType`.
BitsArray = npt.NDArray[Any]

LANES = 16
"""Outputs of a product that lie side by side. Sizes of a decoder are multiples of it."""


class WeightType(enum.Enum):
    """How a weight is stored, by the numpy type that holds its bits. Arithmetic is in float32."""

    FLOAT32 = np.float32
    BFLOAT16 = np.uint16
    FLOAT16 = np.int16
    FP8 = np.uint8  # e4m3fn
    # Each weight in its own type of `group_formats`, or of those above FP8.
    GROUPS = np.int8


def widened(bits: BitsArray, weight_type: WeightType) -> FloatArray:
    """The float32 values of float32, bfloat16 or float16 bits."""
    if weight_type is WeightType.BFLOAT16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if weight_type is WeightType.FLOAT16:
        return bits.view(np.float16).astype(np.float32)
    assert weight_type is WeightType.FLOAT32
    return bits


class Activation(enum.IntEnum):
    """The activation of a gated MLP: activation(gate) * up."""

    SILU = 0
    GELU_TANH = 1
    # gate * sigmoid(1.702 gate) * (up + 1), of gates up to 7 and ups from -7 to 7 (GPT-OSS).
    CLAMPED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """A rotary embedding of the first `2 * len(inv_freq)` dimensions of a head, in halves as
    transformers' `rotate_half` pairs them; cos and sin are multiplied by `scaling`.

    Sequences that may grow beyond `max_short_tokens` have `long_inv_freq` instead, if there is one.
    """

    inv_freq: FloatArray
    scaling: float = 1.0
    long_inv_freq: FloatArray | None = None
    max_short_tokens: int = 0
