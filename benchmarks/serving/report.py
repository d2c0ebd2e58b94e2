"""The table, the JSON and the picture of a run."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.machine import processor
from benchmarks.ratios import Interval
from benchmarks.serving.turns import Measure, RowResult

_HEADER = ("measure", "streams", "dtype", "here", "95 %", "goal", "from")


def table(measures: Sequence[Measure]) -> str:
    """Markdown; what misses its goal is bold."""
    lines = [f"| {' | '.join(_HEADER)} |", "|---|--:|---|--:|---|--:|---|"]
    for measure in measures:
        here, interval = "-", ""
        if measure.value is not None:
            here = f"{measure.value.median:.3g} {measure.unit}".strip()
            interval = f"{measure.value.low:.3g} to {measure.value.high:.3g}"
            if measure.goal is not None and not measure.goal.is_met_by(measure.value.median):
                here = f"**{here}**"
        lines.append(
            f"| {measure.row}: {measure.what} | {measure.streams} | {measure.dtype} | {here} "
            f"| {interval} | {'' if measure.goal is None else measure.goal} | {measure.note} |"
        )
    return "\n".join(lines)


def figures(results: Sequence[RowResult], arguments: Mapping[str, object]) -> dict[str, object]:
    """A run with these arguments, as JSON has it."""
    machine = processor()
    return {
        "command": "python -m benchmarks.serving",
        **arguments,
        "measures": [
            {"processor": machine, **asdict(measure)}
            for result in results
            for measure in result.measures
        ],
        "variants": [
            {
                "dtype": result.measures[0].dtype,
                "row": result.measures[0].row,
                "name": variant.name,
                "streams": variant.streams,
                "unit": variant.unit,
                "figures": variant.figures,
            }
            for result in results
            for variant in result.variants
        ],
    }


def draw(measures: Sequence[Measure], heading: str, path: Path) -> None:
    """Writes a picture: each measure with its interval, and its goal as a line across.

    Needs matplotlib, of the extra `docs`.
    """
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    drawn = [measure for measure in measures if measure.value is not None]
    rows = list(dict.fromkeys(measure.row for measure in drawn))
    parts = [[measure for measure in drawn if measure.row == row] for row in rows]
    heights = [8.0 if mine[0].point else len(mine) + 1.2 for mine in parts]
    figure = plt.figure(figsize=(9, 0.3 * sum(heights) + 0.8), layout="constrained")
    figure.suptitle(textwrap.fill(heading, 110), fontsize=9)
    panels = figure.subfigures(len(rows), height_ratios=heights, squeeze=False)[:, 0]
    for panel, mine in zip(panels, parts, strict=True):
        title = f"{mine[0].row} ({mine[0].unit or 'ratio'})"
        if mine[0].point:
            _draw_curves(panel, mine, title)
        else:
            _draw_bars(panel.subplots(), mine, title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_bars(axes: Any, measures: Sequence[Measure], title: str) -> None:
    for place, measure in enumerate(measures):
        value, goal = measure.value, measure.goal
        assert value is not None
        is_met = goal is None or goal.is_met_by(value.median)
        axes.barh(place, value.median, height=0.6, color="#4c78a8" if is_met else "#e45756")
        axes.plot([value.low, value.high], [place, place], color="black", linewidth=1.2)
        if goal is not None:
            axes.plot([goal.value] * 2, [place - 0.4, place + 0.4], color="#f58518", lw=2)
    axes.set_yticks(
        range(len(measures)),
        [f"{each.what}, {each.streams}, {each.dtype}" for each in measures],
        fontsize=7,
    )
    axes.set_ylim(len(measures) - 0.4, -0.6)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_title(title, fontsize=8, loc="left")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_curves(panel: Any, measures: Sequence[Measure], title: str) -> None:
    """A panel for each figure, with its series as curves, each with its interval."""
    curves: dict[str, dict[str, list[tuple[float, Interval]]]] = {}
    for measure in measures:
        assert measure.point is not None
        assert measure.value is not None
        of_figure = curves.setdefault(measure.point.figure, {})
        of_figure.setdefault(measure.point.series, []).append((measure.point.at, measure.value))
    axes_of = panel.subplots(1, len(curves), squeeze=False)[0]
    for axes, (name, of_figure) in zip(axes_of, curves.items(), strict=True):
        for (series, points), color in zip(of_figure.items(), ("#4c78a8", "#f58518"), strict=False):
            at = [each for each, _ in points]
            axes.plot(at, [value.median for _, value in points], "o-", ms=3, color=color)
            lows, highs = ([getattr(v, end) for _, v in points] for end in ("low", "high"))
            axes.fill_between(at, lows, highs, alpha=0.2, color=color, label=series)
        axes.set_ylim(bottom=0)
        axes.set_xticks(at)
        axes.set_xlabel("% of capacity", fontsize=7)
        axes.tick_params(labelsize=7)
        axes.set_title(f"{name}, {title}", fontsize=8, loc="left")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    axes_of[0].legend(fontsize=7)
