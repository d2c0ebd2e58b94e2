"""What is measured beside its goal, and tables in Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.ratios import Interval, median_interval, ratios
from benchmarks.turns import Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a measure should reach."""

    value: float
    is_most: bool = False

    def is_met_by(self, value: float) -> bool:
        return value <= self.value if self.is_most else value >= self.value

    def __str__(self) -> str:
        return f"{'≤' if self.is_most else '≥'} {self.value:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One line of the table."""

    row: str
    what: str
    streams: int
    dtype: str
    value: Interval
    # Empty: a ratio.
    unit: str = ""
    goal: Goal | None = None
    note: str = ""


def ratio(
    row: str,
    what: str,
    above: Variant,
    below: Variant,
    *,
    dtype: str,
    goal: Goal | None = None,
    note: str = "",
) -> Measure:
    """The rounds' ratios of two variants that ran by turns."""
    names = f"{above.name}, {below.name}"
    speeds = f"{above.median:,.4g} and {below.median:,.4g} {above.unit} ({names})"
    return Measure(
        row=row,
        what=what,
        streams=above.streams,
        dtype=dtype,
        value=median_interval(ratios(above.figures, below.figures)),
        goal=goal,
        note=f"{speeds}{'; ' if note else ''}{note}",
    )


def measures_table(measures: Sequence[Measure]) -> str:
    """One line each; what misses its goal is bold."""
    return table([_cells(measure) for measure in measures])


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Cells by column, the columns those of the first row."""
    if not rows:
        return ""
    lines = [rows[0].keys(), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _cells(measure: Measure) -> dict[str, object]:
    value, goal = measure.value, measure.goal
    here = f"{value.median:.3g} {measure.unit}".strip()
    return {
        "measure": f"{measure.row}: {measure.what}",
        "streams": measure.streams,
        "dtype": measure.dtype,
        "here": here if goal is None or goal.is_met_by(value.median) else f"**{here}**",
        "95 %": f"{value.low:.3g} to {value.high:.3g}",
        "goal": goal or "",
        "from": measure.note,
    }
