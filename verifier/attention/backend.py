"""The interface between the model's layers and a paged attention backend.

Once per step, a backend prepares a `StepAttention` from the layout: everything that all layers
share (masks, slots, ranges). Once per layer, the model's attention function passes it the new
queries, keys and values.
"""

from typing import Any, Protocol

import numpy.typing as npt
import torch

from verifier.attention.kv_cache import KVCache
from verifier.batch.batch_layout import BatchLayout


class StepAttention(Protocol):
    """Attention of one step, prepared."""

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Writes this step's K/V, then attends.

        Args:
            queries: [num_heads, T, head_dim].
            keys, values: [num_kv_heads, T, head_dim].
            sliding_window: how many tokens a token sees, itself included; None: all before it.

        Returns:
            [T, num_heads, head_dim].
        """
        ...


class AttentionBackend(Protocol):
    """Makes a `StepAttention` per step."""

    name: str

    def prepare(self, layout: BatchLayout, cache: KVCache) -> StepAttention: ...


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copies a step's index array to the model's device; on CPU the tensor shares its memory.

    To a GPU the copy goes through pinned memory and is only queued: a copy from ordinary memory
    would first wait for the kernels queued before it.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
