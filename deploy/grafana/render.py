"""Draws the dashboards for the docs, from the data of a real run with faults in it.

    pip install -e '.[docs]'
    python -m deploy.grafana.render docs/images

Runs Tandem with two verifiers of the bundled model, under a load in phases, with a Prometheus
beside it (the `prometheus` binary must be installed), runs the queries of the panels, and draws one
picture per dashboard. Takes some minutes.
"""

import argparse
import asyncio
import contextlib
import math
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, PercentFormatter

from benchmarks.client_load import run_tasks
from benchmarks.services import Service
from benchmarks.workloads import BUNDLED_MODEL, Task, random_tasks, rename_tasks
from deploy.grafana.generate import DASHBOARDS
from deploy.grafana.panels import ROW_WIDTH, Dashboard, Kind, Panel, without_variables
from deploy.prometheus.live_tandem import LiveTandem, live_tandem
from deploy.prometheus.local_prometheus import Prometheus, Series, running_prometheus
from tandem.client import AsyncTandemClient, SpeculationParams

_STEP_S = 2
_WINDOW_S = 20
_SETTLE_S = 4.0
_NUM_STREAMS = 8
# A slowed verifier, by turns.
_STOPPED_S, _RUNNING_S = 0.015, 0.01
_INCHES_PER_ROW = 0.31
# As Grafana has them.
_LINES = ("#7eb26d", "#eab839", "#6ed0e0", "#ef843c", "#e24d42", "#1f78c1", "#ba43a9", "#705da0")
_FILLS = {"red": "#d64545", "orange": "#e09b2d", "green": "#3c9d5c"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws the dashboards.")
    parser.add_argument("folder", type=Path, help="folder for the pictures")
    parser.add_argument("--phase-s", type=float, default=45.0, help="seconds of each phase")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as temporary,
        live_tandem() as tandem,
        running_prometheus(
            tandem.targets(), folder=Path(temporary), interval_s=1, window_s=_WINDOW_S
        ) as prometheus,
    ):
        start_s = time.time()
        phases = asyncio.run(load(tandem, arguments.phase_s))
        for dashboard in DASHBOARDS:
            path = arguments.folder / f"{dashboard.uid}.png"
            draw(dashboard, prometheus, phases, start_s=start_s, path=path)


async def load(tandem: LiveTandem, phase_s: float) -> list[tuple[float, str]]:
    """Runs one kind of load after another; returns each one's start (Unix seconds) and name, and at
    last the end.
    """
    edits = rename_tasks(BUNDLED_MODEL, 32)
    novel = random_tasks(1024, 16)
    bad = tandem.verifiers[0]
    healthy = contextlib.nullcontext()
    began = []
    async with AsyncTandemClient(tandem.gateway.address) as client:
        for title, tasks, fault in (
            ("edits", edits, healthy),
            ("text that does not repeat", novel, healthy),
            ("edits, one verifier slowed", edits, _slowed(bad)),
            ("edits, one verifier frozen", edits, _frozen(bad)),
        ):
            began.append((time.time(), title))
            async with fault:
                await _load_for(client, tasks, phase_s)
                # Scrapes and rules come up to the present, while the fault lasts.
                end_s = time.time()
    await asyncio.sleep(_SETTLE_S)
    return [*began, (end_s, "")]


@contextlib.asynccontextmanager
async def _slowed(service: Service) -> AsyncIterator[None]:
    """As if its processor were throttled."""

    async def throttle() -> None:
        try:
            while True:
                service.process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(_STOPPED_S)
                service.process.send_signal(signal.SIGCONT)
                await asyncio.sleep(_RUNNING_S)
        finally:
            service.process.send_signal(signal.SIGCONT)

    throttling = asyncio.create_task(throttle())
    try:
        yield
    finally:
        throttling.cancel()
        # It lets the process go on, before anything else may stop it.
        await asyncio.wait([throttling])


@contextlib.asynccontextmanager
async def _frozen(service: Service) -> AsyncIterator[None]:
    service.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        service.process.send_signal(signal.SIGCONT)


async def _load_for(client: AsyncTandemClient, tasks: Sequence[Task], duration_s: float) -> None:
    deadline_s = time.monotonic() + duration_s

    async def stream(first: int) -> None:
        index = first
        while time.monotonic() < deadline_s:
            await run_tasks(client, [tasks[index % len(tasks)]], 1, SpeculationParams())
            index += _NUM_STREAMS

    await asyncio.gather(*(stream(first) for first in range(_NUM_STREAMS)))


def draw(
    dashboard: Dashboard,
    prometheus: Prometheus,
    phases: Sequence[tuple[float, str]],
    *,
    start_s: float,
    path: Path,
) -> None:
    """Draws a page as it is at the end of the last phase, with dotted lines between phases."""
    end_s = phases[-1][0]
    heights = [row.panels[0].height for row in dashboard.rows]
    height_in = _INCHES_PER_ROW * (sum(heights) + 3 * len(heights))
    figure = plt.figure(figsize=(15, height_in))
    grid = figure.add_gridspec(
        len(heights),
        ROW_WIDTH,
        height_ratios=heights,
        left=0.04,
        right=0.99,
        top=1 - 0.6 / height_in,
        bottom=0.7 / height_in,
        hspace=0.45,
        wspace=4.2,
    )
    for index, row in enumerate(dashboard.rows):
        left = 0
        for panel in row.panels:
            axes = figure.add_subplot(grid[index, left : left + panel.width])
            left += panel.width
            series = [
                (_legend(query.legend, found), found)
                for query in panel.queries
                for found in prometheus.query_range(
                    without_variables(query.expression, f"{_WINDOW_S}s"),
                    start_s=start_s,
                    end_s=end_s,
                    step_s=_STEP_S,
                )
            ]
            axes.set_title(panel.title, fontsize=10, loc="left", fontweight="bold")
            if panel.kind is Kind.TILE:
                _draw_tile(axes, panel, series)
                continue
            draw_series = _draw_states if panel.kind is Kind.STATES else _draw_lines
            draw_series(axes, panel, series, start_s)
            axes.set_xlim(0, end_s - start_s)
            axes.tick_params(labelsize=8)
            for began_s, _ in phases[1:-1]:
                axes.axvline(began_s - start_s, color="grey", linewidth=0.7, linestyle=":")
    titles = "   |   ".join(f"{began_s - start_s:.0f} s: {title}" for began_s, title in phases[:-1])
    figure.suptitle(
        f"{dashboard.title}      {titles}", fontsize=9, color="dimgrey", y=1 - 0.1 / height_in
    )
    figure.savefig(path, dpi=80, metadata={"Software": ""})
    plt.close(figure)


def _draw_tile(axes: Axes, panel: Panel, series: Sequence[tuple[str, Series]]) -> None:
    """Draws the last values side by side."""
    axes.set_xlim(0, max(1, len(series)))
    axes.set_ylim(0, 1)
    axes.set_axis_off()
    for index, (legend, found) in enumerate(series):
        value = found.values[-1][1]
        axes.add_patch(plt.Rectangle((index + 0.02, 0), 0.96, 1, color=_fill(panel, value)))
        axes.text(
            index + 0.5, 0.58, _written(panel, value), ha="center", va="center", fontsize=17,
            color="white", fontweight="bold",
        )  # fmt: skip
        axes.text(index + 0.5, 0.17, legend, ha="center", va="center", fontsize=8, color="white")


def _draw_states(
    axes: Axes, panel: Panel, series: Sequence[tuple[str, Series]], start_s: float
) -> None:
    """Draws a bar per legend; series of one legend follow each other in time."""
    legends = sorted({legend for legend, _ in series}, reverse=True)
    for legend, found in series:
        for at_s, value in found.values:
            axes.barh(
                legends.index(legend),
                _STEP_S,
                left=at_s - start_s,
                height=0.7,
                color=_fill(panel, value),
            )
    for index, legend in enumerate(legends):
        axes.text(9, index, legend, va="center", fontsize=8, color="white")
    axes.set_yticks([])


def _draw_lines(
    axes: Axes, panel: Panel, series: Sequence[tuple[str, Series]], start_s: float
) -> None:
    is_stacked = panel.kind is Kind.PARTS
    axes.set_prop_cycle(color=_LINES)
    below: dict[float, float] = {}
    for legend, found in series:
        times_s = [at_s - start_s for at_s, _ in found.values]
        values = [value for _, value in found.values]
        if is_stacked:
            lower = [below.get(at_s, 0.0) for at_s in times_s]
            values = [
                low + (0.0 if math.isnan(value) else value)
                for low, value in zip(lower, values, strict=True)
            ]
            colour = _LINES[len(axes.collections) % len(_LINES)]
            axes.fill_between(
                times_s, lower, values, label=legend, alpha=0.7, linewidth=0, color=colour
            )
            below.update(zip(times_s, values, strict=True))
        else:
            axes.plot(times_s, values, label=legend, linewidth=1.3)
    axes.set_ylim(bottom=0, top=panel.max_value and panel.max_value * 1.02)
    if panel.unit == "percentunit":
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    elif panel.unit == "s":
        scale, unit = (1, "s") if axes.get_ylim()[1] >= 1 else (1000, "ms")
        axes.yaxis.set_major_formatter(
            FuncFormatter(lambda value, _: f"{scale * value:.3g} {unit}")
        )
    axes.grid(alpha=0.25)
    for bound, colour in panel.colours[1:]:
        if bound <= axes.get_ylim()[1]:
            axes.axhline(bound, color=_FILLS[colour], linewidth=0.9, linestyle="--")
    axes.legend(
        fontsize=7,
        loc="upper left",
        bbox_to_anchor=(0, -0.09),
        ncols=3 if len(series) > 2 else 2,
        frameon=False,
        borderaxespad=0,
    )


def _fill(panel: Panel, value: float) -> str:
    """The colour of a value."""
    colours = [colour for bound, colour in panel.colours[1:] if value >= bound]
    return _FILLS[(colours or [panel.colours[0][1]])[-1]]


def _written(panel: Panel, value: float) -> str:
    """A value with its unit."""
    if panel.unit == "percentunit":
        return f"{100 * value:.3g} %"
    if panel.unit == "s":
        return f"{value:g} s" if value >= 1 else f"{1000 * value:.3g} ms"
    return f"{value:.3g}"


def _legend(template: str, found: Series) -> str:
    for label, value in found.labels.items():
        template = template.replace(f"{{{{{label}}}}}", value)
    return template.strip()


if __name__ == "__main__":
    main()
