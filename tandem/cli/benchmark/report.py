"""The figures of a run: a table on stdout, a JSON file, a plot."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich import box
from rich.table import Table

from tandem.cli.terminal import output_console, report
from tandem.load import plot
from tandem.load.answer import LATENCIES, PERCENTILES, Summary

_WIDTH = 120


def write(
    summaries: Mapping[str, Summary], workload: str, json_file: Path | None, plot_file: Path | None
) -> bool:
    """Writes the files; False if one could not be, which is reported."""
    try:
        if json_file is not None:
            json_file.write_text(json.dumps(_as_json(summaries, workload), indent=2) + "\n")
        if plot_file is not None:
            plot.draw(summaries, plot_file)
    except (OSError, ValueError) as error:
        report("bench", str(error))
        return False
    return True


def print_table(summaries: Mapping[str, Summary]) -> None:
    console = output_console(_WIDTH)
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("speculation", no_wrap=True)
    for name in summaries:
        table.add_column(name, justify="right", no_wrap=True)
    for title, cells in _rows(list(summaries.values())):
        table.add_row(title, *cells)
    console.print(table)
    for name, summary in summaries.items():
        if note := summary.speculation_note:
            console.print(f"speculation {name}: {note}")
    if len(summaries) == 2 and summaries["off"].tokens_per_s:
        ratio = summaries["on"].tokens_per_s / summaries["off"].tokens_per_s
        console.print(f"{ratio:.2f} times the tokens/s with speculation")


def _rows(summaries: list[Summary]) -> Iterator[tuple[str, list[str]]]:
    yield "requests", [str(len(each.answers)) for each in summaries]
    yield "failed", [str(each.num_failed) for each in summaries]
    yield "seconds", [f"{each.duration_s:.1f}" for each in summaries]
    yield "requests/s", [f"{each.requests_per_s:.2f}" for each in summaries]
    # A server that does not tell them has "-".
    yield "output tokens", [_figure(each.output_tokens or None, "d") for each in summaries]
    yield "tokens/s", [_figure(each.tokens_per_s or None, ".1f") for each in summaries]
    yield "acceptance rate", [_figure(each.acceptance_rate, ".0%") for each in summaries]
    yield (
        "mean acceptance length",
        [_figure(each.mean_acceptance_length, ".2f") for each in summaries],
    )
    found = [each.percentiles_ms() for each in summaries]
    for name in LATENCIES:
        keys = [f"p{percent}" for percent in PERCENTILES]
        yield (
            f"{name} ms, {' / '.join(keys)}",
            [" / ".join(_figure(each[name][key], ".1f") for key in keys) for each in found],
        )


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _as_json(summaries: Mapping[str, Summary], workload: str) -> dict[str, object]:
    return {
        "workload": workload,
        "speculation": {name: summary.to_json() for name, summary in summaries.items()},
    }
