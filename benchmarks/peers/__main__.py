"""Tokens per second of Tandem beside OpenVINO GenAI, llama.cpp, onnxruntime-genai, transformers.

    python -m benchmarks.peers --threads 1 2 --dtype float32 bfloat16 --rounds 5 --json FILE
    python -m benchmarks.peers --model random-0.6b --lookup --streams 1 --prompts 2 --max-new 32

Held-out renames, greedy, prefix caches off everywhere. Each system runs in a process of its own:
Tandem in process (the engine with the drafter's kernel) and as all its services, and each peer
plain and with its own prompt lookup. Peers are installed from PyPI on first use, pinned, in
environments of their own under --cache; the checkpoint is converted there once. A peer that cannot
be installed or run is named, and the others go on.

Variants alternate, round after round. A speed is the median over the rounds; "÷ Tandem" is the
median of the rounds' ratios to Tandem in process, plain over plain and drafts over speculation.
"identical" counts answers that equal, token for token, transformers' plain greedy ones in float32.
"first token" is the time from a process's start, with kernels compiled and the model converted
before; memory is that of the process and all it started, after as many streams as were measured.
Compare figures of one run only.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import processor
from benchmarks.peers import random_model
from benchmarks.peers.catalogue import PEERS, TRANSFORMERS, Peer
from benchmarks.peers.comparison import Comparison, compare
from benchmarks.peers.environments import InstallError, python_of
from benchmarks.peers.protocol import PLAIN, Options, Request, converted_folder
from benchmarks.peers.report import figures, table
from benchmarks.peers.worker_process import running_worker
from benchmarks.workloads import BUNDLED_MODEL, rename_tasks

CACHE = Path.home() / ".cache" / "tandem" / "peers"


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parse(argv)
    cache: Path = arguments.cache
    is_random = str(arguments.model) == random_model.NAME
    model = random_model.random_model(cache) if is_random else arguments.model.resolve()
    requests = [
        Request(
            prompt=list(task.prompt_token_ids),
            max_new_tokens=min(task.max_new_tokens, arguments.max_new),
        )
        for task in rename_tasks(model, arguments.prompts)
    ]
    peers: list[tuple[Peer, Path]] = []
    not_installed = {}
    for peer in PEERS:
        if peer.name in arguments.peers:
            try:
                peers.append((peer, python_of(peer, cache, _say)))
            except InstallError as error:
                not_installed[peer.name] = str(error)
                _say(f"{peer.name} is left out: {error}")

    def options(dtype: str, threads: int) -> Options:
        return Options(
            model=model,
            converted=converted_folder(cache, model, dtype),
            dtype=dtype,
            threads=threads,
            project_paths=tuple(path for path in sys.path if path.endswith("site-packages")),
        )

    reference = _reference(options("float32", max(arguments.threads)), requests, cache)
    comparisons: list[Comparison] = []
    heading = f"{processor()}; {len(requests)} prompts, {arguments.rounds} rounds, " + ", ".join(
        f"{peer.name} {peer.package.version}" for peer, _ in peers if peer.package is not None
    )
    for dtype in arguments.dtype:
        for threads in arguments.threads:
            _say(f"{dtype}, threads: {threads}")
            comparison = compare(
                peers,
                requests,
                reference,
                options=options(dtype, threads),
                streams=arguments.streams,
                lookups=arguments.lookup,
                rounds=arguments.rounds,
                logs=cache / "logs",
                say=_say,
            )
            comparison.errors |= not_installed
            comparisons.append(comparison)
            if arguments.json:
                result = {
                    "command": "python -m benchmarks.peers",
                    "processor": processor(),
                    "model": str(arguments.model.name),
                    "rounds": arguments.rounds,
                    "prompts": len(requests),
                    "packages": {
                        peer.name: list(peer.package.requirements)
                        for peer, _ in peers
                        if peer.package is not None
                    },
                    "comparisons": [figures(each) for each in comparisons],
                }
                arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(heading)
    for comparison in comparisons:
        print("\n" + table(comparison, len(requests)))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [peer.name for peer in PEERS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--peers", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument(
        "--model",
        type=Path,
        default=BUNDLED_MODEL,
        help=f"folder of a Qwen3 checkpoint, or {random_model.NAME}: random weights of that shape",
    )
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1], help="of each peer's model")
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
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args(argv)


def _reference(options: Options, requests: Sequence[Request], cache: Path) -> list[list[int]]:
    """Returns transformers' plain greedy answers in float32, each prompt alone."""
    _say("asks transformers for the answers to compare with")
    (worker,) = (peer.worker for peer in PEERS if peer.name == TRANSFORMERS)
    log = cache / "logs" / "reference.log"
    with running_worker(Path(sys.executable), worker, options, log) as process:
        return process.ask(PLAIN, requests, 1).token_ids


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
