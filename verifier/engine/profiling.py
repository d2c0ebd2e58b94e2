"""Names for the phases of a step in torch's profiler, and in NVTX through `emit_nvtx`.

A profile covers the thread that started it: start and stop one with `Engine.call`.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.autograd import profiler

P = ParamSpec("P")
R = TypeVar("R")


def ranged(name: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls the function, inside the range `tandem.<name>` while somebody profiles.

    The range itself would take microseconds at every step, profiled or not.
    """
    if not profiler._is_profiler_enabled:
        return function(*args, **kwargs)
    with profiler.record_function(f"tandem.{name}"):
        return function(*args, **kwargs)
