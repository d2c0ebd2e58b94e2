"""How the threads of a forward pass share its work.

All threads run the same kernel. A phase's work is cut into items that threads take one by one; a
barrier ends the phase. Which thread computes an item changes no bit. A mark (`MARK_BYTES` of zeros)
belongs to one phase of one forward pass: it counts the items taken and the threads that arrived.
Between two passes the threads wait for the next round, and soon sleep (a futex: so Linux only).
"""

import platform
from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types

from servicekit.kernels.jit import kernel
from verifier.cpu.kernels.vectors import INT32, INT64, intrinsic, pointer

# Items and arrivals on cache lines of their own.
MARK_BYTES = 128
_ARRIVALS = 64

# Some 20 microseconds each; after it, a thread lets others run, or sleeps.
_SPINS_BEFORE_YIELD = 1000
_SPINS_BEFORE_SLEEP = 1000

# A control block of the threads: the number of the round, and how many threads sleep.
CONTROL_BYTES = 128
SLEEPERS = 64

_yield_processor: Any = types.ExternalFunction("sched_yield", types.int32())
_system_call: Any = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))
_MACHINE = platform.machine()
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(_MACHINE, -1)
_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 128, 129


@intrinsic
def _fetch_add(typing_context: Any, address: Any, value: Any) -> Any:
    """Adds to the int64 at an address, atomically; returns what was there."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = pointer(builder, arguments[0], INT64)
        return builder.atomic_rmw("add", place, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), code


@intrinsic
def _load_acquire(typing_context: Any, address: Any) -> Any:
    """The int64 at an address, with all that was written before it was."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(pointer(builder, arguments[0], INT64), "seq_cst", 8)

    return types.int64(types.int64), code


@intrinsic
def _pause(typing_context: Any) -> Any:
    """Tells the processor that this is a waiting loop."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if _MACHINE == "x86_64":
            kind, name, values = [], "llvm.x86.sse2.pause", []
        else:
            # YIELD
            kind, name, values = [INT32], "llvm.aarch64.hint", [ir.Constant(INT32, 1)]
        function = builder.module.globals.get(name)
        if function is None:
            function = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), kind), name)
        builder.call(function, values)
        return context.get_dummy_value()

    return types.void(), code


fetch_add = cast(Callable[[int, int], int], _fetch_add)
load_acquire = cast(Callable[[int], int], _load_acquire)


@kernel
def take(mark: int) -> int:
    """The next item of the phase that no thread has taken."""
    return fetch_add(mark, 1)


@kernel
def arrive(mark: int, num_threads: int) -> None:
    """The phase's barrier: returns when all threads have called it."""
    if num_threads == 1:
        return
    fetch_add(mark + _ARRIVALS, 1)
    spins = 0
    while load_acquire(mark + _ARRIVALS) < num_threads:
        _pause()
        spins += 1
        if spins > _SPINS_BEFORE_YIELD:
            _yield_processor()


@kernel
def arrive_last(mark: int, num_threads: int, thread: int) -> None:
    """The barrier of a pass's last phase. Only thread 0 waits, since it then resets the marks."""
    if thread == 0:
        arrive(mark, num_threads)
    else:
        fetch_add(mark + _ARRIVALS, 1)


@kernel
def announce(control: int) -> None:
    """Begins the next round of work, and wakes the threads that sleep."""
    fetch_add(control, 1)
    if load_acquire(control + SLEEPERS) > 0:
        _system_call(_FUTEX, control, _FUTEX_WAKE_PRIVATE, 1 << 30, 0, 0, 0)


@kernel
def await_round(control: int, known: int) -> int:
    """Returns the number of the round, once it is not `known` any more.

    Sleeps after a short time: the pause between two steps may be long, and others need the
    processor.
    """
    for _ in range(_SPINS_BEFORE_SLEEP):
        if load_acquire(control) != known:
            return load_acquire(control)
        _pause()
    fetch_add(control + SLEEPERS, 1)
    while load_acquire(control) == known:
        _system_call(_FUTEX, control, _FUTEX_WAIT_PRIVATE, known & 0xFFFFFFFF, 0, 0, 0)
    fetch_add(control + SLEEPERS, -1)
    return load_acquire(control)
