"""Variants that are measured by turns, so that a machine that slows down slows all alike."""

import statistics
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Variant:
    """Something to measure with a number of streams; each turn gives one figure, of `unit`."""

    name: str
    streams: int
    turn: Callable[[], Awaitable[float]]
    unit: str = "tokens/s"
    figures: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.figures)


def blocking(
    name: str, streams: int, figure: Callable[[], float], unit: str = "tokens/s"
) -> Variant:
    """A variant whose turn blocks."""

    async def turn() -> float:
        return figure()

    return Variant(name=name, streams=streams, turn=turn, unit=unit)


async def by_turns(
    variants: Sequence[Variant], rounds: int, is_enough: Callable[[], bool] = lambda: False
) -> None:
    """Runs every variant once per round, after one turn each to warm up.

    Each second round runs in the opposite order, so that a machine that gets slower all the time
    favours none.

    Args:
        is_enough: asked after each round; ends early.
    """
    for variant in variants:
        say(f"warms up {variant.name}, {variant.streams}")
        await variant.turn()
    for number in range(rounds):
        for variant in variants if number % 2 == 0 else reversed(variants):
            variant.figures.append(await variant.turn())
            say(
                f"round {number + 1}: {variant.name}, {variant.streams}: "
                f"{variant.figures[-1]:.4g} {variant.unit}"
            )
        if is_enough():
            break


def say(line: str) -> None:
    """Tells progress, on standard error."""
    print(line, file=sys.stderr, flush=True)
