"""`tandem generate`: one request to a gateway, its text streamed to stdout.

Owns the flags of a request and the output of results and errors.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any, NoReturn

from tandem.cli.speculation_flags import add_speculation_flags, speculation_params
from tandem.cli.up import DEFAULT_GRPC_PORT
from tandem.client import (
    Chunk,
    Event,
    Generation,
    GenerationRequest,
    RetryPolicy,
    SamplingParams,
    StepTrace,
    TandemClient,
    TandemError,
    TlsOptions,
    Traced,
    Usage,
)
from tandem.generation import EventCollector
from tandem.trace_text import TraceText, summary_text

_INTERRUPTED = 130
_TOKEN_VARIABLE = "TANDEM_TOKEN"
# Somebody waits: a gateway that is not there is reported within a second.
_RETRY = RetryPolicy(max_attempts=4)

# Features that other systems have a flag for and that are out of Tandem's scope.
_OUT_OF_SCOPE = {
    "--num-beams": "beam search",
    "--tree-width": "drafts that branch",
    "--lora": "adapters (LoRA)",
    "--adapter": "adapters (LoRA)",
    "--image": "images, sound and video",
}


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "generate",
        help="stream a completion",
        description="Streams a completion of PROMPT to stdout. Without other flags it is greedy, "
        "with speculation, up to the model's limit.",
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("prompt", nargs="?", metavar="PROMPT", help="text to continue")
    prompt.add_argument(
        "--token-ids", type=_token_ids, metavar="1,2,3", help="token ids to continue, not text"
    )
    parser.add_argument(
        "--target",
        default=f"127.0.0.1:{DEFAULT_GRPC_PORT}",
        metavar="HOST:PORT",
        help="the gateway, or several, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"bearer token for the gateway (default: the variable {_TOKEN_VARIABLE}, if set)",
    )
    parser.add_argument(
        "--allow-plaintext-token",
        action="store_true",
        help="send the token without TLS to other machines, too",
    )
    parser.add_argument("--model-id", default="", help="model, if the gateway serves several")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="maximum output tokens")
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before it; repeatable",
    )
    parser.add_argument(
        "--priority", type=int, default=0, metavar="N", help="higher first; 0 is the default"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object at the end: token_ids, text, finish_reason, usage",
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="print every step of the model, then the output and its cost; the servers must allow "
        "it (tandem up --allow-trace)",
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    sampling.add_argument("--top-p", type=float)
    sampling.add_argument("--top-k", type=int, default=0)
    sampling.add_argument("--seed", type=int)
    add_speculation_flags(parser)
    for flag, what in _OUT_OF_SCOPE.items():
        parser.add_argument(flag, action=_OutOfScope, const=what, nargs="?", help=argparse.SUPPRESS)
    tls = parser.add_argument_group("TLS")
    tls.add_argument("--tls", action="store_true", help="speak TLS; implied by the others")
    tls.add_argument("--tls-ca", type=Path, metavar="FILE", help="certificates to trust (PEM)")
    tls.add_argument("--tls-cert", type=Path, metavar="FILE", help="own certificate (PEM)")
    tls.add_argument("--tls-key", type=Path, metavar="FILE", help="its key (PEM)")
    parser.set_defaults(run=run)


class _OutOfScope(argparse.Action):
    """A flag that is refused by name, with or without a value."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> NoReturn:
        parser.error(f"{option_string}: Tandem does not do {self.const}")


def run(arguments: argparse.Namespace) -> int:
    try:
        client = TandemClient(
            arguments.target,
            tls=_tls(arguments),
            token=_token(arguments),
            allow_plaintext_token=arguments.allow_plaintext_token,
            retry=_RETRY,
        )
        with client:
            request = _request(arguments)
            _show(client.stream(request), request, as_json=arguments.json)
    except TandemError as error:
        _fail(f"{error} ({error.code.name})")
        return 1
    except BrokenPipeError:
        return 0  # the reader of stdout has closed it
    except (OSError, ValueError) as error:
        _fail(str(error))
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def _request(arguments: argparse.Namespace) -> GenerationRequest:
    return GenerationRequest(
        prompt=arguments.prompt if arguments.token_ids is None else arguments.token_ids,
        model_id=arguments.model_id,
        max_new_tokens=arguments.max_new_tokens,
        stop_sequences=arguments.stop,
        priority=arguments.priority,
        trace=arguments.trace,
        sampling=SamplingParams(
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            top_k=arguments.top_k,
            seed=arguments.seed,
        ),
        speculation=speculation_params(arguments),
    )


def _tls(arguments: argparse.Namespace) -> TlsOptions | None:
    files = (arguments.tls_ca, arguments.tls_cert, arguments.tls_key)
    if not arguments.tls and not any(files):
        return None
    return TlsOptions(ca=files[0], certificate=files[1], key=files[2])


def _token(arguments: argparse.Namespace) -> str | None:
    if arguments.token_file is not None:
        token: str = arguments.token_file.read_text().strip()
        return token
    return os.environ.get(_TOKEN_VARIABLE) or None


def _show(
    events: Generator[Event, None, None], request: GenerationRequest, *, as_json: bool
) -> None:
    collector = EventCollector()
    steps: list[StepTrace] = []
    trace_text = TraceText(() if isinstance(request.prompt, str) else request.prompt)
    streams_text = not (as_json or request.trace)
    streamed = False
    with contextlib.closing(events):
        try:
            for event in events:
                collector.add(event)
                if isinstance(event, Chunk) and event.text and streams_text:
                    streamed = True
                    print(event.text, end="", flush=True)
                elif isinstance(event, Traced):
                    if as_json:
                        steps.append(event.step)
                    else:
                        print(trace_text.step(event.step), flush=True)
        finally:
            if streamed:  # so that an error or a shell prompt begins on a new line
                print(flush=True)
    generation = collector.generation()
    if as_json:
        shown = _as_json(generation)
        if request.trace:
            shown["trace"] = [dataclasses.asdict(step) for step in steps]
        print(json.dumps(shown, ensure_ascii=False), flush=True)
    elif request.trace:
        print(f"\n{generation.text}\n\n{summary_text(generation.usage)}", flush=True)


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


def _fail(message: str) -> None:
    print(f"tandem generate: {' '.join(message.split())}", file=sys.stderr)


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ids like 1,2,3") from None
