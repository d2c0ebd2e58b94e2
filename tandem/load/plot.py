"""A picture of the latencies of each variant, by matplotlib."""

from collections.abc import Mapping
from pathlib import Path

from tandem.load.answer import Summary

#: How the names of files end that can be drawn.
SUFFIXES = (".png", ".svg", ".pdf")

_SHOWN = ("TTFT", "ITL", "E2E")


def draw(summaries: Mapping[str, Summary], file: Path) -> None:
    """Draws, for each latency, the share of requests that were at least as fast.

    Args:
        file: its suffix, one of `SUFFIXES`, chooses the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(_SHOWN)), _SHOWN, strict=True):
        for variant, summary in summaries.items():
            if values_ms := [1e3 * value for value in summary.latencies_s(name)]:
                axes.ecdf(values_ms, label=variant)
        axes.set_xlabel(f"{name}, milliseconds")
        axes.set_ylabel("share of requests")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.savefig(file)
