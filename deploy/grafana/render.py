"""Draws the key panels of the dashboards for the docs, from the data of a real run.

    pip install -e '.[docs]'
    python -m deploy.grafana.render docs/images

Runs Tandem with the bundled model under a load in phases, with a Prometheus beside it (the
`prometheus` binary must be installed), runs the queries of the panels, and draws one picture per
dashboard. Takes some minutes.
"""

import argparse
import asyncio
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, PercentFormatter

from benchmarks.client_load import run_tasks
from benchmarks.workloads import BUNDLED_MODEL, Task, random_tasks, rename_tasks
from deploy.grafana.generate import DASHBOARDS
from deploy.grafana.panels import Panel, without_variables
from deploy.prometheus.live_tandem import live_tandem
from deploy.prometheus.local_prometheus import Prometheus, Series, running_prometheus
from tandem.client import AsyncTandemClient, SpeculationParams

KEY_PANELS = {
    "tandem-overview": [
        "Tokens",
        "Time to first token",
        "Inter-token latency",
        "Requests",
        "Choices open",
        "K/V blocks in use",
    ],
    "tandem-speculation": [
        "Acceptance rate",
        "Mean acceptance length",
        "Gain over plain decoding",
        "Acceptance by position",
        "Depth chosen",
        "What became of hints",
    ],
    "tandem-capacity": [
        "K/V blocks",
        "Tokens per step",
        "Time by phase",
        "Tokens and steps",
        "Memory",
        "Held",
    ],
}

_STEP_S = 2
_RATE_INTERVAL = "15s"
_SETTLE_S = 4.0
_COLUMNS = 3
# More would cover the lines.
_MOST_NAMED = 8


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws the dashboards' key panels.")
    parser.add_argument("folder", type=Path, help="folder for the pictures")
    parser.add_argument("--phase-s", type=float, default=45.0, help="seconds of each phase")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as temporary,
        live_tandem() as tandem,
        running_prometheus(tandem.targets(), folder=Path(temporary), interval_s=1) as prometheus,
    ):
        start_s = time.time()
        phases = asyncio.run(load(tandem.gateway.address, arguments.phase_s))
        time.sleep(_SETTLE_S)
        for dashboard in DASHBOARDS:
            by_title = {panel.title: panel for panel in dashboard.panels()}
            panels = [by_title[title] for title in KEY_PANELS[dashboard.uid]]
            path = arguments.folder / f"{dashboard.uid}.png"
            draw(panels, prometheus, phases, start_s=start_s, path=path)


async def load(address: str, phase_s: float) -> list[tuple[float, str]]:
    """Runs one kind of load after another; returns each one's start (Unix seconds) and name."""
    edits = rename_tasks(BUNDLED_MODEL, 32)
    novel = random_tasks(1024, 16)
    began = []
    async with AsyncTandemClient(address) as client:
        for title, tasks, streams in (
            ("edits, 1 stream", edits, 1),
            ("edits, 8 streams", edits, 8),
            ("text that does not repeat, 8 streams", novel, 8),
            ("both, 16 streams", [*edits, *novel], 16),
        ):
            began.append((time.time(), title))
            await _load_for(client, tasks, streams, phase_s)
    return began


async def _load_for(
    client: AsyncTandemClient, tasks: Sequence[Task], streams: int, duration_s: float
) -> None:
    deadline_s = time.monotonic() + duration_s

    async def stream(first: int) -> None:
        index = first
        while time.monotonic() < deadline_s:
            await run_tasks(client, [tasks[index % len(tasks)]], 1, SpeculationParams())
            index += streams

    await asyncio.gather(*(stream(first) for first in range(streams)))


def draw(
    panels: Sequence[Panel],
    prometheus: Prometheus,
    phases: Sequence[tuple[float, str]],
    *,
    start_s: float,
    path: Path,
) -> None:
    """Draws all panels into one picture, with dotted lines between phases."""
    end_s = time.time()
    rows = math.ceil(len(panels) / _COLUMNS)
    figure, grid = plt.subplots(rows, _COLUMNS, figsize=(13, 3.1 * rows), layout="constrained")
    for axes, panel in zip(grid.flat, panels, strict=True):
        series = [
            (query.legend, found)
            for query in panel.queries
            for found in prometheus.query_range(
                without_variables(query.expression, _RATE_INTERVAL),
                start_s=start_s,
                end_s=end_s,
                step_s=_STEP_S,
            )
        ]
        if panel.heatmap:
            _draw_heatmap(axes, [found for _, found in series], start_s)
        else:
            _draw_lines(axes, panel, series, start_s)
        axes.set_title(panel.title, fontsize=10, loc="left", fontweight="bold")
        axes.set_xlim(0, end_s - start_s)
        axes.tick_params(labelsize=8)
        for began_s, _ in phases:
            axes.axvline(began_s - start_s, color="grey", linewidth=0.7, linestyle=":")
    titles = "   |   ".join(f"{began_s - start_s:.0f} s: {title}" for began_s, title in phases)
    figure.suptitle(titles, fontsize=9, color="dimgrey")
    figure.savefig(path, dpi=80, metadata={"Software": ""})
    plt.close(figure)


def _draw_lines(
    axes: Axes, panel: Panel, series: Sequence[tuple[str, Series]], start_s: float
) -> None:
    drawn = [
        (_legend(legend, found), [at_s - start_s for at_s, _ in found.values], found)
        for legend, found in series
    ]
    # Too many for a legend: in order, from dark to light, and only the first and the last named.
    is_crowded = len(drawn) > _MOST_NAMED
    if is_crowded:
        drawn.sort(key=lambda each: (len(each[0]), each[0]))
        axes.set_prop_cycle(color=mpl.colormaps["viridis"](np.linspace(0, 0.9, len(drawn))))
    below: dict[float, float] = {}
    for index, (legend, times_s, found) in enumerate(drawn):
        if is_crowded and 0 < index < len(drawn) - 1:
            legend = "_"
        values = [value for _, value in found.values]
        if panel.stacked:
            lower = [below.get(at_s, 0.0) for at_s in times_s]
            values = [
                low + (0.0 if math.isnan(value) else value)
                for low, value in zip(lower, values, strict=True)
            ]
            axes.fill_between(times_s, lower, values, label=legend, alpha=0.6, linewidth=0)
            below.update(zip(times_s, values, strict=True))
        else:
            axes.plot(times_s, values, label=legend, linewidth=1.1)
    axes.set_ylim(bottom=0, top=panel.max_value and panel.max_value * 1.02)
    if panel.unit == "percentunit":
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    elif panel.unit == "s":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{1000 * value:g} ms"))
    elif panel.unit == "bytes":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 2**10:.0f} KiB"))
    axes.grid(alpha=0.25)
    limit = panel.alarming_over if panel.alarming_under is None else panel.alarming_under
    if limit is not None and limit <= axes.get_ylim()[1]:
        axes.axhline(limit, color="firebrick", linewidth=0.8, linestyle="--")
    num_columns = 2 if 4 < len(drawn) <= _MOST_NAMED else 1
    axes.legend(fontsize=7, framealpha=0.6, loc="best", ncols=num_columns)


def _draw_heatmap(axes: Axes, series: Sequence[Series], start_s: float) -> None:
    """Draws buckets as rows, coloured by their share of the observations at each time."""
    of_bound = {float(found.labels["le"]): dict(found.values) for found in series}
    totals = of_bound.pop(math.inf)
    bounds = sorted(of_bound)
    below = dict.fromkeys(totals, 0.0)
    for row, bound in enumerate(bounds):
        shares = [
            (of_bound[bound][at_s] - below[at_s]) / total if total else 0.0
            for at_s, total in totals.items()
        ]
        below = of_bound[bound]
        axes.scatter(
            [at_s - start_s for at_s in totals],
            [row] * len(totals),
            c=shares,
            cmap="Blues",
            vmin=0,
            vmax=1,
            s=26,
            marker="s",
            linewidths=0,
        )
    axes.set_ylim(-0.5, len(bounds) - 0.5)
    axes.set_yticks(range(len(bounds)), [f"{bound:g}" for bound in bounds])


def _legend(template: str, found: Series) -> str:
    for label, value in found.labels.items():
        template = template.replace(f"{{{{{label}}}}}", value)
    return template.replace("{{namespace}}", "").strip()


if __name__ == "__main__":
    main()
