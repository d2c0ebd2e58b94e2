"""Kernels that begin before the one before them has ended (programmatic dependent launch).

Between two kernels of a stream a GPU stands still for about a microsecond, and a small kernel waits
as long again for the first numbers it reads. From Hopper on, a kernel may be launched so that it
begins when all programs of the one before have ended or have let it begin, and says itself from
where on it needs what that one has written:

    weights = tl.load(...)              # not written by the kernel before
    wait_for_kernel_before(OVERLAPS)
    rows = tl.load(...)
    let_next_kernel_begin(OVERLAPS)     # only of use if that one overlaps, too

Every program must wait, whatever it does then: else the kernel might end before the one before it,
and the next one, which waits for it alone, might begin. Before that it may read what any earlier
kernel has written, since the one before has waited for those; it must write nothing.
"""

import torch
import triton
import triton.language as tl

_LEAST_CAPABILITY = (9, 0)


def can_overlap(device: torch.device) -> bool:
    """Whether kernels of this device can begin so."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False  # tests look at what would be chosen on a GPU
    return torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def overlap_options(overlaps: bool) -> dict[str, bool]:
    """Arguments of a kernel's launch."""
    return {"OVERLAPS": overlaps, "launch_pdl": overlaps}


@triton.jit
def wait_for_kernel_before(OVERLAPS: tl.constexpr):
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_kernel_begin(OVERLAPS: tl.constexpr):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
