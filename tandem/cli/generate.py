"""`tandem generate`: one request to a gateway, its text streamed to stdout.

Owns the flags of a request and the output of results and errors.
"""

import contextlib
import dataclasses
import itertools
import json
import re
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from tandem.cli.connection_flags import ConnectionFlags
from tandem.cli.flag_groups import with_flag_groups
from tandem.cli.speculation_flags import SpeculationFlags
from tandem.cli.terminal import has_colour, is_live, printable, report, waiting_for
from tandem.client import (
    Chunk,
    Event,
    Generation,
    GenerationRequest,
    RetryPolicy,
    SamplingParams,
    Started,
    StepTrace,
    TandemClient,
    TandemError,
    Traced,
    Usage,
)
from tandem.generation import EventCollector
from tandem.trace_text import TraceText, summary_text

_LATE_CONTROL = re.compile("[\x7f-\x9f]")

EXAMPLES = (
    "tandem generate '<|code|>total = price + tax<|rename|>total<|to|>bill<|out|>' --show-drafts",
    "tandem generate --token-ids 5,6,7 --max-new-tokens 16 --json",
    "tandem generate 'def add(a, b):' --target gateway:50050 --tls-ca ca.pem --no-speculation",
)

# A shorter wait needs no word.
_PATIENCE_S = 2.0
# Somebody waits: a gateway that is not there is reported within a second.
_RETRY = RetryPolicy(max_attempts=4)

# Bold as well, since not everybody tells green from other colours.
_DRAFTED = "\x1b[1;32m"
_PLAIN = "\x1b[0m"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags:
    """How tokens are chosen."""

    temperature: Annotated[float, typer.Option(rich_help_panel="Sampling", help="0 is greedy")] = (
        0.0
    )
    seed: Annotated[
        int | None, typer.Option(rich_help_panel="Sampling", help="equal seeds, equal output")
    ] = None

    def params(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, seed=self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """What goes to stdout and stderr."""

    as_json: bool
    trace: bool
    colours_steps: bool
    summary: bool


@with_flag_groups
def command(
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="text to continue")] = None,
    *,
    token_ids: Annotated[
        str | None, typer.Option(metavar="1,2,3", help="token ids to continue, not text")
    ] = None,
    model_id: Annotated[str, typer.Option(help="model, if the gateway serves several")] = "",
    max_new_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="maximum output tokens")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="print one JSON object at the end: token_ids, text, finish_reason, usage",
        ),
    ] = False,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="print every step of the model, then the output and its cost; the servers must "
            "allow it (tandem up --allow-trace)",
        ),
    ] = False,
    show_drafts: Annotated[
        bool,
        typer.Option(
            "--show-drafts",
            help="print accepted drafts in bold green and all else plain; with --token-ids, the "
            "whole text of a step that accepted drafts; everything is plain where stdout is no "
            "terminal or NO_COLOR is set",
        ),
    ] = False,
    sampling: SamplingFlags,
    speculation: SpeculationFlags,
    connection: ConnectionFlags,
) -> int:
    """Streams a completion of PROMPT to stdout.

    Without other flags it is greedy, with speculation, up to the model's limit. If stderr is a
    terminal, tokens, seconds and acceptance are printed there at the end.
    """
    connection.check()
    colours = show_drafts and not (as_json or trace) and has_colour(sys.stdout)
    request = GenerationRequest(
        prompt=_prompt(prompt, token_ids),
        model_id=model_id,
        max_new_tokens=max_new_tokens,
        trace=trace,
        # A server without a tokenizer refuses it, and takes token ids only.
        report_tokens=colours and token_ids is None,
        sampling=sampling.params(),
        speculation=speculation.params(),
    )
    shown = _Shown(
        as_json=as_json,
        trace=trace,
        colours_steps=colours and token_ids is not None,
        summary=is_live(sys.stderr),
    )
    try:
        client = TandemClient(
            connection.target,
            tls=connection.tls_options(),
            token=connection.token(),
            allow_plaintext_token=connection.allow_plaintext_token,
            retry=_RETRY,
        )
        with client:
            _show(client.stream(request), request, shown)
    except TandemError as error:
        report("generate", connection.describe(error))
        return 1
    except BrokenPipeError:
        return 0  # the reader of stdout has closed it
    except (OSError, ValueError) as error:
        report("generate", str(error))
        return 1
    return 0


def _prompt(prompt: str | None, token_ids: str | None) -> str | list[int]:
    if (prompt is None) == (token_ids is None):
        raise typer.BadParameter("give PROMPT or --token-ids, one of them", param_hint="PROMPT")
    if prompt is not None:
        return prompt
    assert token_ids is not None
    try:
        return [int(part) for part in token_ids.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{token_ids!r} is not a list of ids like 1,2,3", param_hint="--token-ids"
        ) from None


def _after_waiting(events: Generator[Event, None, None]) -> Iterator[Event]:
    """The events; until the first output is there, stderr says what is waited for."""
    first = []
    with waiting_for("the first token", after_s=_PATIENCE_S):
        for event in events:
            first.append(event)
            if not isinstance(event, Started):
                break
    yield from first
    yield from events


def _show(events: Generator[Event, None, None], request: GenerationRequest, shown: _Shown) -> None:
    collector = EventCollector()
    steps: list[StepTrace] = []
    trace_text = TraceText(() if isinstance(request.prompt, str) else request.prompt)
    streams_text = not (shown.as_json or shown.trace)
    in_terminal = is_live(sys.stdout)
    streamed = False
    started_at_s = time.perf_counter()
    with contextlib.closing(events):
        try:
            for event in _after_waiting(events):
                collector.add(event)
                if isinstance(event, Chunk) and event.text and streams_text:
                    streamed = True
                    text = _for_terminal(event, shown) if in_terminal else event.text
                    print(text, end="", flush=True)
                elif isinstance(event, Traced):
                    if shown.as_json:
                        steps.append(event.step)
                    else:
                        print(trace_text.step(event.step), flush=True)
        finally:
            if streamed:  # so that an error or a shell prompt begins on a new line
                print(flush=True)
    seconds = time.perf_counter() - started_at_s
    generation = collector.generation()
    if shown.as_json:
        result = _as_json(generation)
        if shown.trace:
            result["trace"] = [dataclasses.asdict(step) for step in steps]
        # Python's own escapes, for what the encoding lacks, are no JSON.
        text = json.dumps(result, ensure_ascii=getattr(sys.stdout, "encoding", None) != "utf-8")
        if in_terminal:
            # JSON escapes most control characters by itself, but not these.
            text = _LATE_CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
        print(text, flush=True)
    elif shown.trace:
        text = printable(generation.text) if in_terminal else generation.text
        print(f"\n{text}\n\n{summary_text(generation.usage)}", flush=True)
    if shown.summary:
        print(_summary_line(generation.usage, seconds), file=sys.stderr, flush=True)


def _for_terminal(chunk: Chunk, shown: _Shown) -> str:
    """The text for a terminal; with reported tokens, accepted drafts have a colour."""
    if not chunk.reported_tokens:
        return _coloured(chunk.text, shown.colours_steps and chunk.num_accepted_tokens > 0)
    return "".join(
        _coloured("".join([token.text for token in tokens]), accepted)
        for accepted, tokens in itertools.groupby(
            chunk.reported_tokens, lambda token: token.accepted
        )
    )


def _coloured(text: str, is_drafted: bool) -> str:
    text = printable(text)
    return f"{_DRAFTED}{text}{_PLAIN}" if is_drafted and text else text


def _summary_line(usage: Usage, seconds: float) -> str:
    parts = [
        f"{usage.output_tokens} tokens in {seconds:.2f} s",
        f"{usage.output_tokens / seconds:.1f} tokens/s",
    ]
    if usage.acceptance_rate is None:
        parts.append("no drafts")
    else:
        parts += [
            f"{usage.acceptance_rate:.0%} of {usage.num_draft_tokens} drafts accepted",
            f"mean acceptance length {usage.mean_acceptance_length:.2f}",
        ]
    return ", ".join(parts)


def _as_json(generation: Generation) -> dict[str, Any]:
    return {
        "token_ids": generation.token_ids,
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "usage": _usage_as_json(generation.usage),
    }


def _usage_as_json(usage: Usage) -> dict[str, Any]:
    """Every field, and every property derived from them."""
    derived = [name for name, value in vars(Usage).items() if isinstance(value, property)]
    return dataclasses.asdict(usage) | {name: getattr(usage, name) for name in derived}
