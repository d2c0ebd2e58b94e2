"""How much work one turn of an event loop does, counted: the same on every machine.

Each call of a function counts, in Python or in C: code that handles many things calls one for each.
What a single call in C does with something large counts by its weight.
"""

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, MappingProxyType
from typing import Any
from unittest import mock

#: By owner and name of a function, what it does in C, by its arguments.
Weights = Mapping[tuple[Any, str], Callable[..., int]]

#: The most that a turn may do; a call takes some 0.3 us.
MAX_WORK = 100_000


class Turns:
    """The turns of a loop.

    Attributes:
        most: the work of that which does most.
        total: the work of all.
    """

    def __init__(self) -> None:
        self.most = self.total = 0
        self._of_this = 0

    def add(self, work: int) -> None:
        """Counts work of the turn that runs."""
        self._of_this += work

    def count(self, frame: FrameType, event: str, arg: object) -> None:
        """For `sys.setprofile`."""
        if event in ("call", "c_call"):
            self._of_this += 1

    def end_turn(self) -> None:
        self.most = max(self.most, self._of_this)
        self.total += self._of_this
        self._of_this = 0


@contextlib.contextmanager
def counted(
    counts: Callable[[asyncio.Handle], bool] = lambda handle: True,
    *,
    weights: Weights = MappingProxyType({}),
) -> Iterator[Turns]:
    """Counts the work of the running loop until the context ends.

    Args:
        counts: whether a callback's work does.
        weights: of functions that are called by the name of their owner.
    """
    turns = Turns()
    loop: Any = asyncio.get_running_loop()
    run, run_turn = asyncio.Handle._run, loop._run_once

    def counted_run(handle: asyncio.Handle) -> None:
        if counts(handle):
            sys.setprofile(turns.count)
        try:
            run(handle)
        finally:
            sys.setprofile(None)

    def counted_turn() -> None:
        run_turn()
        turns.end_turn()

    def weighed(function: Callable[..., Any], weight: Callable[..., int]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # In other threads, there is none.
            if sys.getprofile() is not None:
                turns.add(weight(*args, **kwargs))
            return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(asyncio.Handle, "_run", counted_run))
        patches.enter_context(mock.patch.object(loop, "_run_once", counted_turn))
        for (owner, name), weight in weights.items():
            function = weighed(getattr(owner, name), weight)
            patches.enter_context(mock.patch.object(owner, name, function))
        yield turns
