"""The table, the JSON and the picture of a run."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.machine import processor
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


def figures(results: Sequence[RowResult], **about: object) -> dict[str, object]:
    """A run as JSON has it."""
    machine = processor()
    return {
        "command": "python -m benchmarks.serving",
        **about,
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
    heights = [sum(measure.row == row for measure in drawn) + 1.2 for row in rows]
    figure, grid = plt.subplots(
        len(rows),
        figsize=(9, 0.3 * sum(heights) + 0.8),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    figure.suptitle(heading, fontsize=9)
    for axes, row in zip(grid[:, 0], rows, strict=True):
        mine = [measure for measure in drawn if measure.row == row]
        for place, measure in enumerate(mine):
            value, goal = measure.value, measure.goal
            assert value is not None
            is_met = goal is None or goal.is_met_by(value.median)
            axes.barh(place, value.median, height=0.6, color="#4c78a8" if is_met else "#e45756")
            axes.plot([value.low, value.high], [place, place], color="black", linewidth=1.2)
            if goal is not None:
                axes.plot([goal.value] * 2, [place - 0.4, place + 0.4], color="#f58518", lw=2)
        axes.set_yticks(
            range(len(mine)),
            [f"{each.what}, {each.streams}, {each.dtype}" for each in mine],
            fontsize=7,
        )
        axes.set_ylim(len(mine) - 0.4, -0.6)
        axes.tick_params(axis="x", labelsize=7)
        axes.set_title(f"{row} ({mine[0].unit or 'ratio'})", fontsize=8, loc="left")
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
