"""Tokens per second of Tandem beside OpenVINO GenAI and transformers.

    python -m benchmarks.peers [--dtype float32] [--threads 1] [--rounds 5] [--json FILE] [--quick]
    python -m benchmarks.peers --model random-0.6b --lookup --streams 1 --prompts 2 --max-new 32

Held-out renames, greedy, prefix caches off everywhere. Each system runs in a process of its own:
Tandem in process (the engine with the drafter's kernel) and as all its services, and each peer
plain and with its own prompt lookup. OpenVINO is installed from PyPI on first use, pinned, in an
environment of its own under --cache; the checkpoint is converted there once. A peer that cannot be
installed or run is named, and the others go on.

Variants alternate, round after round. A speed is the median over the rounds; "÷ Tandem" is the
median of the rounds' ratios to Tandem in process, plain over plain and drafts over speculation.
"identical" counts answers that equal, token for token, transformers' plain greedy ones in float32.
Compare figures of one run only.
"""

import argparse
import asyncio
import contextlib
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.arguments import add_model, command_parser, write_figures
from benchmarks.machine import processor
from benchmarks.peers.catalogue import PEERS, TANDEM, TRANSFORMERS, Peer
from benchmarks.peers.environments import InstallError, python_of
from benchmarks.peers.protocol import PLAIN, SPECULATION, Options, Request, converted_folder
from benchmarks.peers.worker_process import PeerError, WorkerProcess, running_worker
from benchmarks.ratios import median_ratio
from benchmarks.report import table
from benchmarks.shapes import QWEN3_0_6B, write_checkpoint
from benchmarks.turns import Variant, blocking, by_turns, say
from benchmarks.workloads import rename_tasks

CACHE = Path.home() / ".cache" / "tandem" / "peers"
# Qwen3 0.6B's shape with random weights: a model of real size, decoded plainly.
RANDOM_MODEL = "random-0.6b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """A peer in one mode with a number of streams."""

    peer: str
    mode: str
    streams: int
    tokens_per_s: Sequence[float]
    over_tandem: float | None
    # Requests answered as the reference answers them.
    num_identical: int


async def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parse(argv)
    model = _model(arguments)
    requests = [
        Request(
            prompt=list(task.prompt_token_ids),
            max_new_tokens=min(task.max_new_tokens, arguments.max_new),
        )
        for task in rename_tasks(model, arguments.prompts)
    ]
    options = Options(
        model=model,
        converted=converted_folder(arguments.cache, model, arguments.dtype),
        dtype=arguments.dtype,
        threads=arguments.threads,
    )
    logs: Path = arguments.cache / "logs"
    say("asks transformers for the answers to compare with")
    in_float32 = replace(options, dtype="float32")
    with _running(TRANSFORMERS, Path(sys.executable), in_float32, logs) as worker:
        reference = worker.ask(PLAIN, requests, 1).token_ids
    speeds: list[Speed] = []
    errors: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        workers: dict[Peer, WorkerProcess] = {}
        for name in arguments.peers:
            try:
                python = python_of(PEERS[name], arguments.cache, say)
            except InstallError as error:
                errors[name] = str(error)
                continue
            running = _running(PEERS[name], python, options, logs)
            workers[PEERS[name]] = stack.enter_context(running)
        for streams in arguments.streams:
            speeds += await _measure(workers, requests, reference, streams, arguments, errors)
    print(f"{processor()}; {arguments.dtype}, threads: {arguments.threads}\n")
    print(table([_cells(speed, len(requests)) for speed in speeds]))
    for name, reason in errors.items():
        print(f"\nNot measured: {name}: {reason}")
    figures = {"speeds": [asdict(speed) for speed in speeds], "errors": errors}
    write_figures("peers", arguments, figures)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser("peers", __doc__)
    add_model(parser)
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16])
    parser.add_argument(
        "--lookup",
        nargs="*",
        type=int,
        default=[5, 10, 20],
        help="numbers of tokens that prompt lookup drafts; without one: no prompt lookup",
    )
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-new", type=int, default=1024, help="most output tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cache", type=Path, default=CACHE, help="environments and converted models"
    )
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.streams, arguments.lookup = [1], [10]
        arguments.prompts, arguments.max_new, arguments.rounds = 1, 24, 1
    return arguments


def _model(arguments: argparse.Namespace) -> Path:
    if str(arguments.model) != RANDOM_MODEL:
        folder: Path = arguments.model.resolve()
        return folder
    return write_checkpoint(
        QWEN3_0_6B, arguments.cache, device=torch.device("cpu"), dtype=torch.bfloat16
    )


def _running(
    peer: Peer, python: Path, options: Options, logs: Path
) -> contextlib.AbstractContextManager[WorkerProcess]:
    return running_worker(python, peer.worker, options, logs / f"{peer.name}.log")


async def _measure(
    workers: dict[Peer, WorkerProcess],
    requests: Sequence[Request],
    reference: Sequence[Sequence[int]],
    streams: int,
    arguments: argparse.Namespace,
    errors: dict[str, str],
) -> list[Speed]:
    """What fails is left out, and named in `errors`."""
    variants: dict[tuple[Peer, str], Variant] = {}
    num_identical: dict[tuple[Peer, str], int] = {}
    for peer, worker in workers.items():
        for mode in peer.modes(streams, arguments.lookup):

            def tokens_per_s(worker: WorkerProcess = worker, mode: str = mode) -> float:
                return worker.ask(mode, requests, streams).tokens_per_s

            name = f"{peer.name}, {mode}"
            say(f"tries {name}, {streams}")
            try:
                answers = worker.ask(mode, requests, streams).token_ids
            except PeerError as error:
                errors[f"{name}, {streams}"] = str(error)
                continue
            num_identical[peer, mode] = sum(
                list(answer) == list(expected)
                for answer, expected in zip(answers, reference, strict=True)
            )
            variants[peer, mode] = blocking(name, streams, tokens_per_s)
    await by_turns(list(variants.values()), arguments.rounds)
    speeds = []
    for (peer, mode), variant in variants.items():
        own = variants.get((TANDEM, PLAIN if mode == PLAIN else SPECULATION))
        speeds.append(
            Speed(
                peer=peer.name,
                mode=mode,
                streams=streams,
                tokens_per_s=variant.figures,
                over_tandem=None if own is None else median_ratio(variant.figures, own.figures),
                num_identical=num_identical[peer, mode],
            )
        )
    return speeds


def _cells(speed: Speed, num_requests: int) -> dict[str, object]:
    median = statistics.median(speed.tokens_per_s)
    return {
        "what": f"{speed.peer}, {speed.mode}",
        "streams": speed.streams,
        "tokens/s": f"{median:,.0f}",
        "÷ Tandem": "-" if speed.over_tandem is None else f"{speed.over_tandem:.2f}",
        "identical": f"{speed.num_identical}/{num_requests}",
    }


if __name__ == "__main__":
    asyncio.run(main())
