"""Launches the kernels of experts. Imports Triton, so only where there is a GPU.

No launch depends on the contents of a tensor: nothing waits for the device, and CUDA graphs of a
number of tokens can be captured. Tiles are the same for every number of tokens, so a token's bits
depend on it alone.
"""

import torch
import triton

from verifier.checkpoint.weight_types import Activation
from verifier.gpu.kernels.experts import (
    add_experts_kernel,
    down_kernel,
    find_tiles_kernel,
    gate_up_kernel,
)
from verifier.gpu.kernels.fusion import FUSED
from verifier.gpu.kernels.product import arguments_of
from verifier.gpu.weights import ExpertWeights

# Hopper's matrix units take 64 rows. Few tokens fill such a tile with nothing, which costs little
# where reading the weights bounds the product. (Not tuned.)
TILE = 64
_BLOCK_N = 64
# By bytes, so that a pipeline of three stages fits into the shared memory of every GPU.
_BLOCK_K_BYTES = 128
_CHUNK = 128
_SUM_BLOCK = 1024


def max_num_tiles(num_pairs: int, num_experts: int) -> int:
    """The most tiles that so many pairs can fill, whatever their experts."""
    most_experts = min(num_pairs, num_experts)
    return (num_pairs + most_experts * (TILE - 1)) // TILE


def mix(
    rows: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    experts: ExpertWeights,
    activation: Activation,
) -> torch.Tensor:
    """As `verifier.gpu.layers.experts.Mixture`. Kernels run on the thread's current GPU."""
    num_tokens, hidden_size = rows.shape
    num_experts, _, size = experts.down.shape
    per_token = chosen.shape[1]
    mixed = torch.empty_like(rows)
    num_pairs = num_tokens * per_token
    # A grid without programs is an error.
    if not num_pairs:
        return mixed
    num_tiles = max_num_tiles(num_pairs, num_experts)
    of_pairs, order = chosen.flatten().sort(stable=True)
    tiles = rows.new_empty((num_tiles, 3), dtype=torch.int32)
    find_tiles_kernel[(1,)](
        of_pairs,
        tiles,
        num_pairs,
        num_tiles,
        num_pairs.bit_length(),
        TILE=TILE,
        EXPERTS=triton.next_power_of_2(num_experts),
        CHUNK=_CHUNK,
        **FUSED,
    )
    block_k = _BLOCK_K_BYTES // rows.element_size()
    gated = rows.new_empty(num_pairs, size)
    *weight, constants = arguments_of(experts.gate_up)
    gate_up_kernel[(num_tiles, triton.cdiv(size, _BLOCK_N))](
        rows,
        *weight,
        experts.gate_up_bias,
        gated,
        order,
        tiles,
        hidden_size,
        size,
        per_token,
        ACTIVATION=int(activation),
        **constants,
        HAS_BIAS=experts.gate_up_bias is not None,
        TILE=TILE,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=block_k,
        **FUSED,
    )
    outputs = rows.new_empty(num_pairs, hidden_size)
    *weight, constants = arguments_of(experts.down)
    down_kernel[(num_tiles, triton.cdiv(hidden_size, _BLOCK_N))](
        gated,
        *weight,
        experts.down_bias,
        outputs,
        order,
        tiles,
        hidden_size,
        size,
        **constants,
        HAS_BIAS=experts.down_bias is not None,
        TILE=TILE,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=block_k,
        **FUSED,
    )
    add_experts_kernel[(num_tokens, triton.cdiv(hidden_size, _SUM_BLOCK))](
        outputs, weights, mixed, hidden_size, per_token, BLOCK=_SUM_BLOCK, **FUSED
    )
    return mixed
