"""What ranks exchange inside a forward pass, over torch.distributed: NCCL on GPUs, gloo on CPU.

Nothing else goes over it: a collective has a timeout, and between two steps hours may pass.
"""

import datetime
from typing import Any, Protocol

import torch
import torch.distributed as dist

# Ranks start a step within milliseconds of each other; who is that late never comes.
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
        store: where the ranks find each other; torchrun's.
        is_ordered: sums are formed in the order of the ranks, so that an element's bits depend on
            nothing but its summands. An all-reduce adds in an order that depends on where in the
            tensor the element lies; with two ranks there is only one order.
    """

    def __init__(
        self, store: Any, *, rank: int, size: int, device: torch.device, is_ordered: bool
    ) -> None:
        self.rank = rank
        self.size = size
        self._is_ordered = is_ordered and size > 2
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=_TIMEOUT_S),
            device_id=device if device.type == "cuda" else None,
        )

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        if not self._is_ordered:
            dist.all_reduce(partial)
            return partial
        first, *others = self._all(partial)
        for other in others:
            first += other
        return first

    def concatenate(self, part: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._all(part), dim=-1)

    def close(self) -> None:
        """Ends the group. Only where all ranks do."""
        dist.destroy_process_group()

    def _all(self, part: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous())
        return parts
