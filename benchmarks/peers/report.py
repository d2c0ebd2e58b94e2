"""The table of a comparison, and its JSON form."""

from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.peers.comparison import Comparison, Variant

MIB = 1 << 20


def table(comparison: Comparison, num_requests: int) -> str:
    """Returns a table in Markdown, aligned to be read as text too."""
    streams = sorted({variant.streams for variant in comparison.variants})
    header = ["what"]
    for number in streams:
        plural = "stream" if number == 1 else "streams"
        header += [f"{number} {plural}, tokens/s", "÷ Tandem", "identical"]
    header += ["first token s", "PSS MiB", "peak RSS MiB"]
    rows = [header]
    names = list(dict.fromkeys((variant.peer, variant.mode) for variant in comparison.variants))
    shown: set[str] = set()
    for peer, mode in names:
        row = [f"{peer}, {mode}"]
        for number in streams:
            row += _cells(comparison, _find(comparison, peer, mode, number), num_requests)
        start = None if peer in shown else comparison.starts.get(peer)
        shown.add(peer)
        if start is None:
            row += ["", "", ""]
        else:
            row += [
                f"{start.first_token_s:.1f}",
                f"{start.memory.pss_bytes / MIB:.0f}",
                f"{start.memory.peak_rss_bytes / MIB:.0f}",
            ]
        rows.append(row)
    lines = [f"{comparison.dtype}, {_threads(comparison.threads)}:", "", *_aligned(rows)]
    failures = [f"{peer}: {error}" for peer, error in comparison.errors.items()]
    failures += [
        f"{variant.peer}, {variant.mode}, {variant.streams}: {variant.error}"
        for variant in comparison.variants
        if variant.error is not None and variant.peer not in comparison.errors
    ]
    if failures:
        lines += ["", "Not measured:", "", *(f"- {failure}" for failure in failures)]
    return "\n".join(lines)


def figures(comparison: Comparison) -> dict[str, object]:
    """Returns a comparison as JSON has it."""
    return {
        "dtype": comparison.dtype,
        "threads": comparison.threads,
        "variants": [
            {
                **asdict(variant),
                "median": variant.median if variant.tokens_per_s else None,
                "ratio_to_tandem": comparison.ratio_to_tandem(variant)
                if variant.tokens_per_s
                else None,
            }
            for variant in comparison.variants
        ],
        "starts": {peer: asdict(start) for peer, start in comparison.starts.items()},
        "errors": comparison.errors,
    }


def _find(comparison: Comparison, peer: str, mode: str, streams: int) -> Variant | None:
    for variant in comparison.variants:
        if (variant.peer, variant.mode, variant.streams) == (peer, mode, streams):
            return variant
    return None


def _cells(comparison: Comparison, variant: Variant | None, num_requests: int) -> list[str]:
    if variant is None or variant.error is not None or not variant.tokens_per_s:
        return ["-", "-", "-"]
    ratio = comparison.ratio_to_tandem(variant)
    return [
        f"{variant.median:,.0f}",
        "-" if ratio is None else f"{ratio:.2f}",
        f"{variant.num_identical}/{num_requests}",
    ]


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return f"| {' | '.join(cells)} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return [line(rows[0]), line(rule), *(line(row) for row in rows[1:])]
