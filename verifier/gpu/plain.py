"""The decoder's operations in plain torch: on a CPU, and the oracle of the Triton kernels."""

import torch
import torch.nn.functional

from verifier.checkpoint.weight_types import Activation
from verifier.gpu.groups import GroupedWeight


class PlainOperations:
    """Implements `Operations`; a row's bits may depend on the others."""

    @property
    def is_strict(self) -> bool:
        return False

    def linear(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return torch.nn.functional.linear(rows, weight, bias)

    def grouped_linear(
        self, rows: torch.Tensor, weight: GroupedWeight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.linear(rows, weight.widened(rows.dtype), bias)

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
        total = residual
        if update is not None:
            added = update.float()
            residual.add_(added if update_norm is None else _rms_norm(added, update_norm, eps))
            residual.mul_(scale)
        elif scale != 1.0:
            total = residual * scale
        return (total if weight is None else _rms_norm(total, weight, eps)).to(dtype)

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
        num_kv_heads = keys.shape[1]
        num_heads = qkv.shape[1] - 2 * num_kv_heads
        queries, new_keys, new_values = qkv.float().split(
            [num_heads, num_kv_heads, num_kv_heads], 1
        )
        if head_norms is not None:
            dims = (1, 2) if norms_projections else (2,)
            weights = head_norms.tensor_split((num_heads, num_heads + num_kv_heads))
            queries, new_keys, new_values = (
                _rms_norm(heads, own, eps, dims) if len(own) else heads
                for heads, own in zip((queries, new_keys, new_values), weights, strict=True)
            )
        all_heads = torch.cat(
            (_rotated(queries, cos_sin), _rotated(new_keys, cos_sin), new_values), dim=1
        )
        rotated = all_heads.to(qkv.dtype)
        stored = rotated[:, num_heads:]
        is_finite = stored.isfinite()
        is_bad.masked_fill_(~is_finite.flatten(1).all(dim=1), 1)
        stored.masked_fill_(~is_finite, 0.0)
        if not num_kv_heads:
            return rotated
        is_stored = slot_mapping >= 0
        slots, stored = slot_mapping[is_stored], stored[is_stored]
        keys[slots], values[slots] = stored.split(num_kv_heads, dim=1)
        return rotated

    def gate(
        self, gate_up: torch.Tensor, activation: Activation, ups: torch.Tensor | None = None
    ) -> torch.Tensor:
        gate, up = (
            gate_up.float().chunk(2, dim=-1) if ups is None else (gate_up.float(), ups.float())
        )
        if activation is Activation.SILU:
            gated = torch.nn.functional.silu(gate)
        elif activation is Activation.CLAMPED:
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1.0
            gated = gate * torch.sigmoid(1.702 * gate)
        else:
            gated = torch.nn.functional.gelu(gate, approximate="tanh")
        return (gated * up).to(gate_up.dtype)


def _rms_norm(
    rows: torch.Tensor, weight: torch.Tensor, eps: float, dims: tuple[int, ...] = (-1,)
) -> torch.Tensor:
    """Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; in float32."""
    return rows * torch.rsqrt(rows.square().mean(dim=dims, keepdim=True) + eps) * weight


def _rotated(heads: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Heads [T, n, D] float32 with their first 2 P dimensions rotated, in halves."""
    num_pairs = cos_sin.shape[2]
    cos, sin = cos_sin[:, 0, None], cos_sin[:, 1, None]
    first, second, rest = heads.tensor_split((num_pairs, 2 * num_pairs), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
