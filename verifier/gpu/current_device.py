"""The GPU that a thread launches kernels on."""

import contextlib

import torch


def current_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Within the context, the GPU is this thread's current one; a CPU needs nothing.

    Kernels of Triton and flash-attn are launched on the thread's current GPU, whatever their
    tensors' is, and each thread has its own: what the thread that loads a model chooses does not
    hold in the engine's.
    """
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
