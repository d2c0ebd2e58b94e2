"""One request through drafter, verifier and gateway, shown step by step.

    python examples/quickstart.py
    python examples/quickstart.py --model FOLDER
    python examples/quickstart.py --trace

Starts the services on free ports, streams one completion, shows for every step of the model how
many tokens were drafted, which were accepted and what the step appended, prints a summary, and
stops the services. The bundled model renames an identifier in a held-out snippet of Python; another
model continues a text. With --trace, each step is shown in full: its tokens, positions, slots,
proposals and drafts.
"""

import dataclasses
import queue
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

if not __package__:  # run as a file: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.demo_model.dataset import MODEL_FOLDER, read_heldout
from tandem.cli.flag_groups import with_flag_groups
from tandem.cli.speculation_flags import SpeculationFlags
from tandem.client import (
    Chunk,
    Event,
    Finished,
    GenerationRequest,
    Started,
    TandemClient,
    TandemError,
    Traced,
)
from tandem.local import LocalTandemError, local_tandem
from tandem.trace_text import TraceText, summary_text

# A held-out task that the model solves exactly.
EXACT_TASK = 53
REPEATING_TEXT = """\
{"name": "Ada Lovelace", "born": 1815, "field": "mathematics"}
{"name": "Alan Turing", "born": 1912, "field": "mathematics"}
{"name": "Grace Hopper", "born": 1906, "field":"""


@with_flag_groups
def main(
    *,
    model: Annotated[Path, typer.Option(metavar="FOLDER")] = MODEL_FOLDER,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto")] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="of weights and K/V (default: the verifier's)")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="text to continue (default: one that suits the model)")
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(metavar="N", help="most output tokens")] = (
        None
    ),
    trace: Annotated[bool, typer.Option("--trace", help="show each step in full")] = False,
    speculation: SpeculationFlags,
) -> int:
    """One request through drafter, verifier and gateway, shown step by step."""
    options = ["--device", device]
    options += ["--dtype", dtype] if dtype else []
    options += ["--allow-trace"] if trace else []
    print(f"starting drafter, verifier and gateway with {model} ...", flush=True)
    try:
        with local_tandem(model=model, options=options, quiet=True) as addresses:
            print(f"the gateway serves gRPC at {addresses['grpc']}", flush=True)
            with TandemClient(addresses["grpc"]) as client:
                request = dataclasses.replace(
                    request_for(model, prompt, max_new_tokens),
                    speculation=speculation.params(),
                    trace=trace,
                    report_tokens=True,
                )
                show_flow(client, request)
    except (LocalTandemError, TandemError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    print("\neverything is stopped")
    return 0


def request_for(model: Path, prompt: str | None, max_new_tokens: int | None) -> GenerationRequest:
    if prompt is not None:
        max_new_tokens = max_new_tokens or 64
    elif model.resolve() == MODEL_FOLDER:
        task = read_heldout()[EXACT_TASK]
        print(f"\nthe task: in {task['source_file']}, rename {task['old']} to {task['new']}")
        prompt = task["prompt"]
    else:
        print(f"\nthe prompt:\n{REPEATING_TEXT}")
        prompt = REPEATING_TEXT
        max_new_tokens = max_new_tokens or 64
    return GenerationRequest(prompt=prompt, max_new_tokens=max_new_tokens)


def show_flow(client: TandemClient, request: GenerationRequest) -> None:
    trace_text = TraceText()
    step = 0
    output = ""
    for event in read_ahead(client.stream(request)):
        match event:
            case Started():
                print(f"\n{event.num_prompt_tokens} prompt tokens; then, step by step:")
                if not request.trace:
                    print(f"{'step':>9}  drafted  accepted  accepted text + appended text")
            case Traced():
                print(trace_text.step(event.step))
            case Chunk() if request.trace:
                output += event.text
                print(f"  {'text':<14}{texts(event)}", flush=True)
            case Chunk():
                first, step = step + 1, step + event.num_steps
                output += event.text
                print(f"{numbered(first, step):>9}  {flow(event)}", flush=True)
            case Finished():
                print(f"\nthe output:\n{output}")
                show_summary(event)


def read_ahead(events: Iterator[Event]) -> Iterator[Event]:
    """The same events, read by a thread, so that printing never delays the stream."""
    read: queue.SimpleQueue[Event | Exception | None] = queue.SimpleQueue()

    def read_all() -> None:
        try:
            for event in events:
                read.put(event)
            read.put(None)
        except Exception as error:
            read.put(error)

    threading.Thread(target=read_all, daemon=True).start()
    while (event := read.get()) is not None:
        if isinstance(event, Exception):
            raise event
        yield event


def numbered(first: int, last: int) -> str:
    """A chunk covers several steps if they come faster than they are sent or read."""
    return str(first) if first == last else f"{first}-{last}"


def flow(chunk: Chunk) -> str:
    counts = f"{chunk.num_draft_tokens:>7}  {chunk.num_accepted_tokens:>8}"
    return f"{counts}  {texts(chunk)}"


def texts(chunk: Chunk) -> str:
    if chunk.num_steps > 1:
        return repr(chunk.text)
    # One step's tokens: the accepted drafts, then the recovered or bonus token.
    accepted = "".join(token.text for token in chunk.reported_tokens if token.accepted)
    appended = chunk.text.removeprefix(accepted)
    return f"{accepted!r} + {appended!r}" if accepted else repr(appended)


def show_summary(finished: Finished) -> None:
    print(f"\nin sum, with finish reason {finished.finish_reason.value}:")
    print(summary_text(finished.usage))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
