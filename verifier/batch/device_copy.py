"""Index arrays of a step on their way to the model's device."""

from typing import Any

import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A tensor of the same type; on CPU it shares the array's memory.

    To a GPU the copy goes through pinned memory and is only put in the stream's queue: a copy
    from ordinary memory would first wait for the kernels queued before it.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
