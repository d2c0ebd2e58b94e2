"""Kernels that begin before the one before them has ended (programmatic dependent launch).

Between two kernels of a stream a GPU stands still for a moment, and a kernel's first loads wait as
long again. From Hopper on, a kernel may be launched so that its programs begin when all those of
the kernel before have ended or have let it begin, and say themselves from where on they need what
that one writes:

    weights = tl.load(...)  # no kernel of a step writes these
    wait_for_kernel_before(OVERLAPS)
    rows = tl.load(...)

Every program must wait, whatever it does then: else its kernel could end before the one before it,
and the next one, which waits for this one alone, could read what that one has not written yet.
Before it waits, a program reads only what no kernel of a step writes, and writes nothing.
"""

import torch
import triton
import triton.language as tl

_LEAST_CAPABILITY = (9, 0)

MOST_OVERLAPPING_ROWS = 128
"""Kernels of steps of more rows begin one after the other: they have many programs, of which each
takes a moment to wait (docs/decisions/gpu-step.md).
"""


def can_overlap(device: torch.device) -> bool:
    """Whether this device's kernels can begin so."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def overlap_options(overlaps: bool, num_rows: int) -> dict[str, bool]:
    """Arguments of the launch of a kernel that has the constant OVERLAPS.

    Args:
        overlaps: whether the device's kernels can, and may.
        num_rows: of the step.
    """
    overlaps = overlaps and num_rows <= MOST_OVERLAPPING_ROWS
    return {"OVERLAPS": overlaps, "launch_pdl": overlaps}


@triton.jit
def wait_for_kernel_before(OVERLAPS: tl.constexpr):
    """Returns when the kernel before has ended; then lets the programs of the next one begin, which
    has an effect when all programs of this one have come so far.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers):
    """Has the L2 cache read the lines that these point into; waits for nothing."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0 is not used",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
