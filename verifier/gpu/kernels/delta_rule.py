"""Launches the kernels of gated delta nets. Imports Triton, so only where there is a GPU."""

import torch
import triton

from verifier.checkpoint.delta_shape import DeltaShape
from verifier.gpu.kernels.delta import delta_kernel, keep_kernel
from verifier.gpu.kernels.fusion import FUSED
from verifier.gpu.layers.deltas import EPS
from verifier.gpu.layers.states import LayerStates, StateTables
from verifier.gpu.weights import DeltaNet

# A quarter of a state of 128 columns: one sequence then has programs for most multiprocessors. (Not
# tuned.) Every `value_dim` is a multiple.
_COLUMNS = 32
_KEPT_BLOCK = 1024


def compute_delta(
    channels: torch.Tensor,
    numbers: torch.Tensor,
    net: DeltaNet,
    shape: DeltaShape,
    states: LayerStates,
    tables: StateTables,
    is_bad: torch.Tensor,
) -> torch.Tensor:
    """As `verifier.gpu.layers.deltas.DeltaRule`. Kernels run on the thread's current GPU."""
    num_heads = shape.num_value_heads
    outputs = torch.empty(
        (len(channels), num_heads, shape.value_dim), dtype=torch.float32, device=channels.device
    )
    num_entries = len(tables.entries)
    # A grid without programs is an error.
    if not num_entries:
        return outputs
    assert channels.stride(1) == 1
    where = (
        tables.counts,
        tables.cu_seqlens_q,
        tables.entries,
        tables.save_offsets,
        tables.saves,
    )
    recent_slot = states.recent.stride(0)
    delta_kernel[(num_entries, num_heads, triton.cdiv(shape.value_dim, _COLUMNS))](
        channels,
        numbers,
        net.convolution,
        net.decay_rate,
        net.decay_bias,
        states.states,
        states.recent,
        *where,
        outputs,
        is_bad,
        channels.stride(0),
        recent_slot,
        shape.key_dim**-0.5,
        EPS,
        NUM_KEY_HEADS=shape.num_key_heads,
        NUM_VALUE_HEADS=num_heads,
        KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim,
        KERNEL_SIZE=shape.kernel_size,
        TAKES_TURNS=shape.takes_turns,
        KEYS=triton.next_power_of_2(shape.key_dim),
        COLUMNS=_COLUMNS,
        TAPS=triton.next_power_of_2(shape.kernel_size),
        num_warps=4,
        **FUSED,
    )
    width = states.recent.shape[2]
    keep_kernel[(num_entries, triton.cdiv(width, _KEPT_BLOCK))](
        channels,
        numbers,
        states.recent,
        *where,
        channels.stride(0),
        recent_slot,
        shape.num_channels,
        2 * num_heads,
        NUM_BEFORE=shape.kernel_size - 1,
        BLOCK=_KEPT_BLOCK,
        **FUSED,
    )
    return outputs
