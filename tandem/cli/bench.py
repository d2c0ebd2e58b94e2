"""`tandem bench`: load on a server, and its latencies, speed and acceptance.

Owns the flags, the turns of the variants and the report.
"""

import asyncio
import collections
import contextlib
import importlib.util
import json
import os
import time
import urllib.parse
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich import box
from rich.table import Table

from tandem.channel import is_loopback_host, load_own_certificate
from tandem.cli.bench_progress import progress
from tandem.cli.connection_flags import ConnectionFlags
from tandem.cli.flag_groups import with_flag_groups
from tandem.cli.terminal import drop_output, output_console, report
from tandem.cli.tls_context import tls_context
from tandem.client import AsyncTandemClient, TandemError
from tandem.load import plot
from tandem.load.answer import LATENCIES, PERCENTILES, Answer, Summary
from tandem.load.endpoints import Endpoint, GrpcEndpoint, OpenAiEndpoint
from tandem.load.run import Amount, run_turn
from tandem.load.workloads import Prompt, WorkloadError, read_workload

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
_WIDTH = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What is sent."""

    prompts: list[Prompt]
    variants: Mapping[str, bool]
    """Whether it speculates, by name."""
    turns: list[Amount]
    concurrency: int
    rate_per_s: float | None
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    """Where it is sent; `url` is None: to a gateway's gRPC."""

    url: str | None
    is_chat: bool
    model_id: str
    timeout_s: float


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
    plan = _Plan(
        prompts=prompts,
        variants=variants[speculation],
        turns=_turns(requests, seconds, num_variants=len(variants[speculation])),
        concurrency=concurrency or _DEFAULT_CONCURRENCY,
        rate_per_s=rate,
        seed=seed,
    )
    server = _Server(url=url, is_chat=api == "chat", model_id=model_id, timeout_s=timeout)
    try:
        summaries = asyncio.run(_run(plan, connection, server))
    except TandemError as error:
        report("bench", connection.describe(error))
        return 1
    except (OSError, ValueError) as error:
        report("bench", str(error))
        return 1
    # Before it is printed: the reader of stdout may be gone.
    are_written = _write(summaries, workload, json_file, plot_file)
    try:
        _print(summaries)
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


def _write(
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


async def _run(plan: _Plan, connection: ConnectionFlags, server: _Server) -> dict[str, Summary]:
    answers: dict[str, list[Answer]] = {name: [] for name in plan.variants}
    durations_s = dict.fromkeys(plan.variants, 0.0)
    num_taken = dict.fromkeys(plan.variants, 0)

    def prompts(name: str) -> Iterator[Prompt]:
        while True:
            prompt = plan.prompts[num_taken[name] % len(plan.prompts)]
            num_taken[name] += 1
            yield prompt

    async with (
        # Also while it waits for the server's first answer.
        progress(_num_requests(plan)) as advance,
        _endpoint(connection, server) as endpoint,
    ):
        for index, amount in enumerate(plan.turns):
            # The variant that runs second finds prompts in the prefix cache: each runs second in
            # half of the turns. Both begin with the same prompt, however many the faster one sent
            # in the last turn.
            num_taken.update(dict.fromkeys(num_taken, max(num_taken.values())))
            variants = list(plan.variants.items())[:: -1 if index % 2 else 1]
            for name, speculates in variants:
                started_at_s = time.perf_counter()
                answers[name] += await run_turn(
                    endpoint,
                    prompts(name),
                    amount,
                    concurrency=plan.concurrency,
                    rate_per_s=plan.rate_per_s,
                    # Both variants get the same arrivals.
                    seed=plan.seed + index,
                    speculates=speculates,
                    on_answer=lambda _: advance(),
                )
                durations_s[name] += time.perf_counter() - started_at_s
    return {name: Summary(answers=answers[name], duration_s=durations_s[name]) for name in answers}


@contextlib.asynccontextmanager
async def _endpoint(connection: ConnectionFlags, server: _Server) -> AsyncIterator[Endpoint]:
    """The server, which has answered a first call.

    Raises:
        TandemError, OSError: it did not.
        ValueError: the token is no token, or would cross a network in plaintext.
    """
    if server.url is None:
        client = AsyncTandemClient(
            connection.target,
            tls=connection.tls_options(),
            token=connection.token(),
            allow_plaintext_token=connection.allow_plaintext_token,
            retry=None,
        )
        async with client:
            served = await client.list_models(timeout_s=server.timeout_s)
            if not served:
                raise OSError(f"{connection.target}: serves no model")
            model_id = server.model_id or served[0].model_id
            yield GrpcEndpoint(client, model_id=model_id, timeout_s=server.timeout_s)
        return
    import openai

    tls = tls_context(connection.tls_ca)
    if connection.tls_cert is not None:
        load_own_certificate(tls, connection.tls_cert, connection.tls_key)
    token = connection.token_of_file()
    # As many connections as --concurrency or --rate need. The library's own type: which package it
    # is from depends on the version.
    no_limits = type(openai.DEFAULT_CONNECTION_LIMITS)(
        max_connections=None, max_keepalive_connections=None
    )
    async with openai.AsyncOpenAI(
        base_url=server.url,
        # The client insists on one; a server without keys does not look at it.
        api_key=token or "none",
        timeout=server.timeout_s,
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(
            verify=tls,
            limits=no_limits,
            # The environment's proxy would look for this machine's servers on its own.
            trust_env=not is_loopback_host(urllib.parse.urlsplit(server.url).hostname or ""),
        ),
    ) as openai_client:
        base_url = openai_client.base_url  # as the client understands the flag
        if (
            token is not None
            and base_url.scheme != "https"
            and not connection.allow_plaintext_token
            and not is_loopback_host(base_url.host)
        ):
            raise ValueError(
                f"the token would go to {base_url.host} in plaintext: use https, "
                "or allow it explicitly"
            )
        try:
            models = await openai_client.models.list()
        except openai.NotFoundError as error:
            raise OSError(f"{server.url}: has no /models; a base URL ends in /v1") from error
        except openai.OpenAIError as error:
            raise OSError(f"{server.url}: {error}") from error
        if not models.data:
            raise OSError(f"{server.url}: serves no model")
        yield OpenAiEndpoint(
            openai_client,
            model_id=server.model_id or models.data[0].id,
            timeout_s=server.timeout_s,
            is_chat=server.is_chat,
        )


def _num_requests(plan: _Plan) -> int | None:
    """Of all variants and turns; None: as many as there is time for."""
    if any(amount.requests is None or amount.seconds is not None for amount in plan.turns):
        return None
    return len(plan.variants) * sum(amount.requests or 0 for amount in plan.turns)


def _print(summaries: Mapping[str, Summary]) -> None:
    console = output_console(_WIDTH)
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("speculation", no_wrap=True)
    for name in summaries:
        table.add_column(name, justify="right", no_wrap=True)
    for title, cells in _rows(list(summaries.values())):
        table.add_row(title, *cells)
    console.print(table)
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
