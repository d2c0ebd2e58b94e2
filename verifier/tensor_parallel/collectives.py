"""The collectives of a forward pass, over torch.distributed: NCCL on GPUs, gloo on CPU.

Nothing else uses torch.distributed: a collective has a timeout, and hours may pass between two
steps.
"""

import datetime
from typing import Any, Protocol

import torch
import torch.distributed as dist

# Ranks start a step within milliseconds of each other: one that is this late never comes.
_TIMEOUT_S = 60.0


class Collectives(Protocol):
    """All ranks call the same methods with equal shapes in the same order."""

    rank: int
    size: int

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, the same on each; `partial` may be overwritten."""
        ...

    def concatenate(self, part: torch.Tensor) -> torch.Tensor:
        """All ranks' parts along the last dimension, in the order of the ranks."""
        ...


class TorchCollectives:
    """Over torch.distributed's default group.

    Args:
        store: torchrun's, through which the ranks find each other.
    """

    def __init__(self, store: Any, *, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=_TIMEOUT_S),
            device_id=device if device.type == "cuda" else None,
        )

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(partial)
        return partial

    def concatenate(self, part: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim=-1)

    def close(self) -> None:
        """Ends the group; all ranks must do so."""
        dist.destroy_process_group()
