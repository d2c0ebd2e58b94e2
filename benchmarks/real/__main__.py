"""A real model through all services, beside other servers of the same file.

    make real-model
    python -m benchmarks.real [--threads 1 2] [--rounds 3] [--json FILE] [--quick]
    python -m benchmarks.real --peers llama-server=PATH,llama-bench=PATH,openvino

Greedy answers to everyday prompts (`tasks.py`), prefix caches off. Tokens per second count whole
requests, over gRPC for Tandem, over HTTP for llama.cpp, in this process for OpenVINO GenAI; each
with its drafts and without. "prompt" is tokens of a prompt per second, up to the first token.
"same" counts answers that equal Tandem's plain ones. Start and memory are those until the first
token, with kernels compiled; memory is over the model's size.

One forward pass by rows is Tandem's decoder in process, beside llama-bench. The model is the one of
`make real-model`, or any GGUF file with a chat template. All alternate, round after round; a figure
is the median, a ratio the median of the rounds' ratios. Compare figures of one run only.
"""

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.arguments import command_parser, write_figures
from benchmarks.machine import processor
from benchmarks.ratios import median_ratio
from benchmarks.real.forward import ROWS, forward_timer, llama_bench_ms
from benchmarks.real.servers import (
    STREAMS,
    Answer,
    Server,
    llama_server,
    openvino_server,
    tandem_server,
)
from benchmarks.real.tasks import PROMPT, real_tasks
from benchmarks.report import table
from benchmarks.services import REPOSITORY, running_stack
from benchmarks.startup import measure_start, usage_of
from benchmarks.turns import Variant, by_turns, say
from benchmarks.workloads import REAL_MODEL, Task
from servicekit.logs import configure_logs
from tandem.client import AsyncTandemClient, SpeculationParams
from verifier.cpu.processor import TILES

DRAFTS, PLAIN = "tandem, drafts", "tandem, plain"
LLAMA_SERVER, LLAMA_BENCH, OPENVINO = "llama-server", "llama-bench", "openvino"
_LOOKUP_TOKENS = 5
_RATIOS = ((2, 1), (3, 2), (7, 6), (12, 1), (16, 1))
_MIB = 1 << 20


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parse(argv)
    tasks = real_tasks(
        arguments.model, count=arguments.prompts, max_new_tokens=arguments.max_new_tokens
    )
    print(f"{processor()}; kernels for {TILES.name}")
    start = _start(arguments)
    print(f"\n{table(start)}", flush=True)
    figures: dict[str, Any] = {"tiles": TILES.name, "start": start}
    for threads in arguments.threads:
        found: dict[str, Any] = {}
        found["rows"] = _forward_passes(arguments, threads)
        print(f"\nrows, threads: {threads}\n\n{table(found['rows'])}", flush=True)
        found["speeds"] = asyncio.run(_speeds(arguments, threads, tasks))
        print(f"\nspeeds, threads: {threads}\n\n{table(found['speeds'])}", flush=True)
        figures[f"threads {threads}"] = found
    write_figures("real", arguments, figures)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser("real", __doc__)
    parser.add_argument("--model", type=Path, default=REAL_MODEL, help="GGUF file")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of the model")
    parser.add_argument("--peers", type=_peers, default={}, help="NAME=PATH, separated by commas")
    parser.add_argument("--prompts", type=int, default=3, help="of each kind, at most 100")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(argv)
    arguments.model = arguments.model.resolve()
    if not arguments.model.is_file():
        parser.error(f"--model: {arguments.model} is no file: make real-model fetches the default")
    if arguments.quick:
        arguments.threads = [1]
        arguments.prompts, arguments.max_new_tokens, arguments.rounds = 1, 8, 1
    return arguments


def _peers(text: str) -> dict[str, str]:
    """Programs by name; OpenVINO is a package and has none."""
    peers = {}
    for each in text.split(","):
        name, _, path = each.partition("=")
        if name not in (LLAMA_SERVER, LLAMA_BENCH, OPENVINO):
            raise argparse.ArgumentTypeError(f"there is no peer {name!r}")
        if name != OPENVINO and not Path(path).is_file():
            raise argparse.ArgumentTypeError(f"{name}: {path!r} is no file")
        peers[name] = path
    return peers


def _start(arguments: argparse.Namespace) -> list[dict[str, str]]:
    """The second start finds what the first has compiled."""
    for _ in range(1 if arguments.quick else 2):
        say("starts tandem up")
        start = measure_start(REPOSITORY, arguments.model)
    size_mb = arguments.model.stat().st_size / _MIB
    found = {
        "tandem up, the verifier's memory": (start.seconds["first token"], start.usage["verifier"])
    }
    if LLAMA_SERVER in arguments.peers:
        started_s = time.perf_counter()
        program = arguments.peers[LLAMA_SERVER]
        with llama_server(LLAMA_SERVER, program, arguments.model, 1) as (server, process):
            one = Task(prompt_token_ids=[1, 2, 3], max_new_tokens=1)
            asyncio.run(server.run("start", [one], 1))
            seconds = time.perf_counter() - started_s
            found[LLAMA_SERVER] = seconds, usage_of(str(process.pid))
    return [
        {
            "what": name,
            "first token, s": f"{seconds:.2f}",
            "RSS, MB": f"{usage.rss_mb:.0f}",
            "RSS ÷ file": f"{usage.rss_mb / size_mb:.2f}",
            "PSS ÷ file": f"{usage.pss_mb / size_mb:.2f}",
        }
        for name, (seconds, usage) in found.items()
    ]


def _forward_passes(arguments: argparse.Namespace, threads: int) -> list[dict[str, object]]:
    """Milliseconds by rows, and what more rows cost."""
    times: dict[str, dict[int, list[float]]] = {"tandem": {rows: [] for rows in ROWS}}
    if LLAMA_BENCH in arguments.peers:
        times[LLAMA_BENCH] = {rows: [] for rows in ROWS}
    with forward_timer(arguments.model, threads) as timed:
        for number in range(arguments.rounds + 1):
            say(f"forward passes, round {number}")
            found = {"tandem": {rows: timed(rows) for rows in ROWS}}
            if LLAMA_BENCH in arguments.peers:
                program = arguments.peers[LLAMA_BENCH]
                found[LLAMA_BENCH] = llama_bench_ms(program, arguments.model, threads)
            if number:  # the first round warms up
                for name, by_rows in found.items():
                    for rows, ms in by_rows.items():
                        times[name][rows].append(ms)
    return [
        {
            "what": name,
            **{f"{rows}, ms": f"{statistics.median(by_rows[rows]):.1f}" for rows in ROWS},
            **{f"{a} ÷ {b}": f"{median_ratio(by_rows[a], by_rows[b]):.2f}" for a, b in _RATIOS},
        }
        for name, by_rows in times.items()
    ]


async def _speeds(
    arguments: argparse.Namespace, threads: int, tasks: Mapping[str, Sequence[Task]]
) -> list[dict[str, object]]:
    """Tokens per second of each server by kind of task; Tandem's tokens per step, and ratios."""
    everyday = [task for kind, some in tasks.items() if kind != PROMPT for task in some]
    columns = {kind: (some, 1) for kind, some in tasks.items()}
    columns[f"{STREAMS} streams"] = everyday, STREAMS
    variants: dict[str, dict[str, Variant]] = {}
    async with contextlib.AsyncExitStack() as stack:
        servers = await _servers(arguments, threads, stack)
        for server in servers:
            variants[server.name] = {
                column: _variant(server, column, some, streams)
                for column, (some, streams) in columns.items()
                if streams <= server.max_streams
            }
        everything = [
            each[column] for column in columns for each in variants.values() if column in each
        ]
        await by_turns(everything, arguments.rounds)
    expected = servers[1].answers
    prompts = [(kind, i) for kind in tasks for i in range(len(tasks[kind]))]
    rows: list[dict[str, object]] = []
    for server in servers:
        own = variants[server.name]
        cells = {each: f"{own[each].median:.1f}" if each in own else "-" for each in columns}
        same = sum(
            list(server.answers[kind][i].token_ids) == list(expected[kind][i].token_ids)
            for kind, i in prompts
        )
        rows.append({"tokens/s": server.name, **cells, "same": f"{same}/{len(prompts)}"})
    steps = {column: _tokens_per_step(servers[0].answers[column]) for column in columns}
    rows.append({"tokens/s": "tokens per step with drafts", **steps, "same": ""})
    for below in (PLAIN, *(server.name for server in servers[2:])):
        above = DRAFTS if below == PLAIN or below.endswith("drafts") else PLAIN
        ratios = {
            each: f"{median_ratio(variants[above][each].figures, variant.figures):.2f}"
            for each, variant in variants[below].items()
        }
        ratios = {each: ratios.get(each, "-") for each in columns}
        rows.append({"tokens/s": f"{above} ÷ {below}", **ratios, "same": ""})
    return rows


async def _servers(
    arguments: argparse.Namespace, threads: int, stack: contextlib.AsyncExitStack
) -> list[Server]:
    """All that run; Tandem's, with drafts and plain, come first."""
    model, peers = arguments.model, arguments.peers
    flags = ["--threads", str(threads), "--no-prefix-cache"]
    gateway = stack.enter_context(running_stack(model=model, verifier_flags=flags))
    client = await stack.enter_async_context(AsyncTandemClient(gateway.address, retry=None))
    servers = [
        tandem_server(DRAFTS, client, SpeculationParams()),
        tandem_server(PLAIN, client, SpeculationParams(enabled=False)),
    ]
    if LLAMA_SERVER in peers:
        for mode, more in (("plain", []), ("drafts", ["--spec-type", "ngram-mod"])):
            running = llama_server(
                f"{LLAMA_SERVER}, {mode}", peers[LLAMA_SERVER], model, threads, more
            )
            servers.append(stack.enter_context(running)[0])
    if OPENVINO in peers:
        servers += [
            openvino_server(f"{OPENVINO}, plain", model, threads, 0),
            openvino_server(f"{OPENVINO}, drafts", model, threads, _LOOKUP_TOKENS),
        ]
    return servers


def _variant(server: Server, column: str, tasks: Sequence[Task], streams: int) -> Variant:
    """Tokens per second; those of the prompt where that is what is measured."""

    async def turn() -> float:
        tokens_per_s = await server.run(column, tasks, streams)
        return tokens_per_s * (len(tasks[0].prompt_token_ids) if column == PROMPT else 1)

    return Variant(name=f"{server.name}, {column}", streams=streams, turn=turn)


def _tokens_per_step(answers: Sequence[Answer]) -> str:
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    return f"{num_tokens / sum(answer.num_steps for answer in answers):.2f}"


if __name__ == "__main__":
    # stdout is the tables'.
    configure_logs("warning", "benchmark")
    main()
