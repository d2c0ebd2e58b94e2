"""The decorator of Triton kernels, and the columns of the tables that they read.

`TRITON_INTERPRET=1` in the environment, before triton is imported, runs the kernels in numpy on
tensors of the CPU.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

# A fused multiply-add rounds once where the host rounds twice: its bits would differ.
NO_FUSION = {"enable_fp_fusion": False}

# Columns of a step's table, one row per sequence, int64; its drafts follow.
SLOT = tl.constexpr(0)
FIRST_ROW = tl.constexpr(1)
NUM_DRAFTS = tl.constexpr(2)
POSITION = tl.constexpr(3)
# How many of its first rows must not give a stop token.
NUM_MASKED = tl.constexpr(4)
# Its first row among the masks of grammars; -1: it has none.
MASK_ROW = tl.constexpr(5)
DRAFTS = tl.constexpr(6)

# Columns of the slots' table of integers, int64.
TOP_K = tl.constexpr(0)
SEED = tl.constexpr(1)
NUM_BIASES = tl.constexpr(2)
NUM_STOPS = tl.constexpr(3)
COUNTS_TOKENS = tl.constexpr(4)
NUM_INTEGERS = tl.constexpr(5)

# Columns of the slots' table of numbers, float64.
TEMPERATURE = tl.constexpr(0)
LOG_MIN_P = tl.constexpr(1)
TOP_P = tl.constexpr(2)
REPETITION = tl.constexpr(3)
FREQUENCY = tl.constexpr(4)
PRESENCE = tl.constexpr(5)
NUM_NUMBERS = tl.constexpr(6)


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, which has no types. A kernel is launched as `kernel[grid](...)`."""
    return triton.jit(function)
