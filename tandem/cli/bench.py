"""`tandem bench`: load on a server, and its latencies, speed and acceptance.

Owns the flags.
"""

import asyncio
import collections
import importlib.util
import os
import urllib.parse
from pathlib import Path
from typing import Annotated, Literal

import typer

from tandem.cli.benchmark.report import print_table, write
from tandem.cli.benchmark.run import Plan, Server, run
from tandem.cli.connection_flags import ConnectionFlags
from tandem.cli.flag_groups import with_flag_groups
from tandem.cli.terminal import drop_output, report
from tandem.client import TandemError
from tandem.load import plot
from tandem.load.run import Amount
from tandem.load.workloads import WorkloadError, read_workload

EXAMPLES = (
    "tandem bench --speculation both --requests 64 --concurrency 8",
    "tandem bench --workload source --rate 4 --seconds 60 --json result.json --plot result.png",
    "tandem bench --url http://127.0.0.1:8001/v1 --api chat --workload source --concurrency 16",
)

# Variants take turns, so that a machine that becomes slower does so for both.
_TURNS = 4
# Requests that were sent so long after their arrival are reported.
_LATE_S = 0.1
# The most frequent reasons of failure have a line each.
_MOST_REASONS = 10
_DEFAULT_REQUESTS = 64
_DEFAULT_CONCURRENCY = 8


@with_flag_groups
def command(
    *,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="base URL of a server of the OpenAI API, ending in /v1, instead of --target; gets "
            "no token but that of --token-file",
        ),
    ] = None,
    api: Annotated[
        Literal["completions", "chat"],
        typer.Option(
            help="of --url: completions, or chat, where each prompt, a text, is a user's message"
        ),
    ] = "completions",
    model_id: Annotated[
        str, typer.Option(help="model, if the server has several (default: the first)")
    ] = "",
    workload: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="prompts: renames (of the bundled model's task), source (Python code), random "
            "(words), or a file of JSON lines with prompt and, if wanted, max_new_tokens and "
            "temperature",
        ),
    ] = "renames",
    max_new_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="of prompts that do not say it themselves")
    ] = 256,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=4096,
            metavar="N",
            help=f"requests at a time (default: {_DEFAULT_CONCURRENCY})",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="PER_SECOND",
            help="requests arrive by themselves, as a Poisson process, instead of --concurrency",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help=f"requests of each variant (default: {_DEFAULT_REQUESTS}, or as --seconds says)",
        ),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="duration of each variant")
    ] = None,
    speculation: Annotated[
        Literal["on", "off", "both"],
        typer.Option(help="with drafts, without, or both by turns"),
    ] = "on",
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="after which a request has failed")
    ] = 120.0,
    seed: Annotated[int, typer.Option(help="of the order of prompts and of the arrivals")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="write all figures there")
    ] = None,
    plot_file: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="draw the latencies there (.png, .svg, .pdf); needs matplotlib",
        ),
    ] = None,
    connection: ConnectionFlags,
) -> int:
    """Puts load on a server and reports latencies, tokens/s and acceptance.

    TTFT is the time to the first output, ITL a gap between two messages with output, TPOT the time
    per output token after the first, E2E the time to the last one; in milliseconds. The exit code
    is 1 if a request failed.
    """
    _check(concurrency=concurrency, rate=rate, seconds=seconds, timeout=timeout)
    _check_files(json_file, plot_file)
    connection.check()
    if url is not None:
        _check_url(url, connection.named_target)
    if plot_file is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("needs matplotlib: pip install matplotlib", param_hint="--plot")
    if url is not None and importlib.util.find_spec("openai") is None:
        raise typer.BadParameter("needs openai: pip install openai", param_hint="--url")
    if api == "chat" and url is None:
        raise typer.BadParameter("chat needs --url", param_hint="--api")
    try:
        prompts = read_workload(workload, max_new_tokens=max_new_tokens, seed=seed)
    except WorkloadError as error:
        raise typer.BadParameter(str(error), param_hint="--workload") from None
    if api == "chat" and not all(isinstance(each.prompt, str) for each in prompts):
        raise typer.BadParameter(f"{workload} has token ids; chat needs texts", param_hint="--api")
    variants = {"on": {"on": True}, "off": {"off": False}, "both": {"on": True, "off": False}}
    plan = Plan(
        prompts=prompts,
        variants=variants[speculation],
        turns=_turns(requests, seconds, num_variants=len(variants[speculation])),
        concurrency=concurrency or _DEFAULT_CONCURRENCY,
        rate_per_s=rate,
        seed=seed,
    )
    server = Server(url=url, is_chat=api == "chat", model_id=model_id, timeout_s=timeout)
    try:
        summaries = asyncio.run(run(plan, connection, server))
    except TandemError as error:
        report("bench", connection.describe(error))
        return 1
    except (OSError, ValueError) as error:
        report("bench", str(error))
        return 1
    # Before it is printed: the reader of stdout may be gone.
    are_written = write(summaries, workload, json_file, plot_file)
    try:
        print_table(summaries)
    except BrokenPipeError:
        drop_output()
    most_late_s = max(summary.most_late_s for summary in summaries.values())
    if most_late_s > _LATE_S:
        report(
            "bench",
            f"requests were sent up to {most_late_s:.1f} s after their arrival, which latencies "
            "include: this process does not keep up with --rate",
        )
    errors = collections.Counter[str]()
    for summary in summaries.values():
        errors.update(summary.errors())
    for reason, count in errors.most_common(_MOST_REASONS):
        report("bench", f"{count} requests failed: {reason}")
    num_others = errors.total() - sum(count for _, count in errors.most_common(_MOST_REASONS))
    if num_others:
        report("bench", f"{num_others} requests failed for other reasons")
    return 1 if errors or not are_written else 0


def _check(
    *, concurrency: int | None, rate: float | None, seconds: float | None, timeout: float
) -> None:
    if concurrency is not None and rate is not None:
        raise typer.BadParameter("not together with --concurrency", param_hint="--rate")
    for flag, value in (("--rate", rate), ("--seconds", seconds), ("--timeout", timeout)):
        # Written so that it refuses NaN, too.
        if value is not None and not 0 < value < float("inf"):
            raise typer.BadParameter(f"{value} is not above 0", param_hint=flag)


def _check_files(json_file: Path | None, plot_file: Path | None) -> None:
    """Refuses, before anything is measured, what could not be written after it."""
    for flag, file in (("--json", json_file), ("--plot", plot_file)):
        if file is None:
            continue
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            raise typer.BadParameter(f"{file} cannot be written", param_hint=flag)
    if plot_file is not None and plot_file.suffix not in plot.SUFFIXES:
        raise typer.BadParameter(
            f"{plot_file} ends in none of {', '.join(plot.SUFFIXES)}", param_hint="--plot"
        )


def _check_url(url: str, target: str | None) -> None:
    if target is not None:
        raise typer.BadParameter("not together with --target", param_hint="--url")
    if "@" in url:
        # A user or a password would be in the figures' title. It is not repeated here, either.
        raise typer.BadParameter(
            "holds a user or a password (an @); use --token-file", param_hint="--url"
        )
    try:
        parts = urllib.parse.urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # no address, or no port
        is_url = False
    if not is_url:
        raise typer.BadParameter(f"{url!r} is no URL like http://HOST:PORT/v1", param_hint="--url")


def _turns(requests: int | None, seconds: float | None, *, num_variants: int) -> list[Amount]:
    """The turns of each variant, which add up to the amount that is wanted."""
    if requests is None and seconds is None:
        requests = _DEFAULT_REQUESTS
    count = 1 if num_variants == 1 else min(_TURNS, requests or _TURNS)
    return [
        Amount(
            requests=None if requests is None else (requests + index) // count,
            seconds=None if seconds is None else seconds / count,
        )
        for index in range(count)
    ]
