"""What the decoder computes besides attention: the interface, and which code does it.

Shape legend: T rows, H hidden size, I intermediate size, D head_dim, P pairs of a rotary embedding.
"""

from typing import Protocol

import torch

from verifier.checkpoint.weight_types import Activation
from verifier.gpu.groups import GroupedWeight


class Operations(Protocol):
    """Computed in float32 and rounded once. Tensors are contiguous, on one device.

    Attributes:
        is_strict: whether a row's bits depend on that row alone. Tensors must begin at a multiple
            of 16 bytes, as torch's and their rows do: where a row begins may decide how a kernel
            adds it up.
    """

    @property
    def is_strict(self) -> bool: ...

    def linear(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows @ weight.T + bias.

        Args:
            rows, weight, bias: [T, K], [N, K] and [N] of one dtype.

        Returns:
            [T, N] of that dtype.
        """
        ...

    def grouped_linear(
        self, rows: torch.Tensor, weight: GroupedWeight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `linear`, by the widened weight."""
        ...

    def add_norm(
        self,
        residual: torch.Tensor,
        update: torch.Tensor | None,
        update_norm: torch.Tensor | None,
        weight: torch.Tensor | None,
        *,
        eps: float,
        dtype: torch.dtype,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """Adds an update to the residual stream, in place; returns the RMS norm of the sum.

        Args:
            residual: [T, H] float32.
            update: [T, H], `dtype`; None: nothing is added, and nothing written.
            update_norm: [H] float32: the update's own RMS norm is added instead; None: itself.
            weight: [H] float32, of the norm; None: the sum is returned as it is.
            scale: of the sum.

        Returns:
            [T, H] of `dtype`.
        """
        ...

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        head_norms: torch.Tensor | None,
        *,
        norms_projections: bool,
        eps: float,
        keys: torch.Tensor,
        values: torch.Tensor,
        slot_mapping: torch.Tensor,
        is_bad: torch.Tensor,
    ) -> torch.Tensor:
        """Normalises and rotates queries and keys, and writes K/V into the cache.

        Numbers in K/V that are not finite become zero, and their tokens are marked.

        Args:
            qkv: [T, heads, D]: query heads, then as many key heads and value heads as the cache,
                which may be none.
            cos_sin: [T, 2, P] float32: cosines, sines. A head's dimension i < P rotates with P + i;
                those from 2 P on do not rotate.
            head_norms: [N, D] float32: weights of the RMS norms of the first N heads, which are
                those of queries; with those of keys; or all. None: there are no norms.
            norms_projections: whether all query heads have one norm together, and all key heads
                another; else each head has its own.
            keys, values: [num_slots, num_kv_heads, D], of qkv's dtype; written.
            slot_mapping: [T] int64; K/V of rows with a slot under zero is not stored.
            is_bad: [T] int32; set to 1 where K or V is not finite, else left as it is.

        Returns:
            [T, heads, D] as `qkv`, rotated.
        """
        ...

    def gate(
        self, gate_up: torch.Tensor, activation: Activation, ups: torch.Tensor | None = None
    ) -> torch.Tensor:
        """activation(gate) * up, [T, I], of [T, 2 * I]: gate, then up; with `ups` [T, I], of [T, I]
        and of them. Rows of both may lie apart.
        """
        ...


def operations_for(device: torch.device, *, is_strict: bool = False) -> Operations:
    """Triton's on a GPU, torch's elsewhere.

    Raises:
        ValueError: there are no strict ones for that device.
    """
    if device.type == "cuda":
        from verifier.gpu.kernels.operations import TritonOperations
        from verifier.gpu.kernels.overlapping_kernels import can_overlap

        properties = torch.cuda.get_device_properties(device)
        return TritonOperations(
            is_strict=is_strict,
            shared_memory=properties.shared_memory_per_multiprocessor,
            overlaps=can_overlap(device),
        )
    if is_strict:
        raise ValueError(f"no strict operations for {device}")
    from verifier.gpu.plain import PlainOperations

    return PlainOperations()
