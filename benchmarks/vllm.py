"""vLLM with drafts from a Tandem drafter, beside its own n-gram proposer and without drafts.

    python -m benchmarks.vllm --model FOLDER [--kind edit] [--streams 1 16] [--num-draft-tokens 8]

Run it in an environment with vLLM 0.22.1 or newer and Tandem's `drafter` extra; FOLDER is a
checkpoint that vLLM loads. `renames` are the bundled model's; the other kinds are prompts of
benchmarks/real/recordings, for SmolLM2's tokenizer.

Each variant's engine is a process of its own, and all stay; they take turns. Prints tokens per
second and per step, and fails if a variant's greedy output is another one than without drafts, or
if other drafts are accepted than the drafter alone gives for these outputs.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.real import recordings
from benchmarks.services import REPOSITORY, running_process
from benchmarks.turns import Variant, by_turns
from benchmarks.workloads import BUNDLED_MODEL, rename_tasks
from tandem.client import DrafterClient, NgramParams

NGRAMS = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
MAX_TOKENS = 256
VARIANTS = ("plain", "ngram", "tandem")


class Engine:
    """vLLM in a process of its own."""

    def __init__(self, variant: str, arguments: argparse.Namespace, drafter: str) -> None:
        """Starts it."""
        options = {
            "variant": variant,
            "model": str(arguments.model),
            "streams": max(arguments.streams),
            "num_draft_tokens": arguments.num_draft_tokens,
            "dtype": arguments.dtype,
        }
        path = os.pathsep.join([str(REPOSITORY / "integrations/vllm"), str(REPOSITORY)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.vllm", "--engine", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={
                **os.environ,
                "PYTHONPATH": path,
                "TANDEM_VLLM_DRAFTER": drafter,
                # So that a busy machine costs time, and no drafts.
                "TANDEM_VLLM_TIMEOUT_MS": "1000",
                # GiB of K/V; unset, each engine takes most of the memory.
                "VLLM_CPU_KVCACHE_SPACE": "2",
                # Custom proposers are of the first runner alone.
                "VLLM_USE_V2_MODEL_RUNNER": "0",
            },
        )

    def run(self, prompts: Sequence[Sequence[int]], streams: int) -> dict[str, Any]:
        """Answers to all prompts: `token_ids` of each, `seconds`, and `accepted` draft tokens."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "streams": streams}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                result: dict[str, Any] = json.loads(line)
                return result
        raise SystemExit(f"vLLM ended with status {self._process.wait()}")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


def accepted_alone(
    drafter: DrafterClient, prompts: Sequence[Sequence[int]], answers: Sequence[list[int]], k: int
) -> int:
    """How many draft tokens are accepted in steps that make these answers."""
    accepted = 0
    params = NgramParams(min_ngram=2, max_ngram=5)
    for prompt, answer in zip(prompts, answers, strict=True):
        sequence = drafter.open(params=params)
        position = 1
        while position < len(answer):
            text = [*prompt, *answer[:position]]
            draft = drafter.propose(sequence, text, max_draft_tokens=k).token_ids
            right = 0
            for proposed, decided in zip(draft, answer[position:], strict=False):
                if proposed != decided:
                    break
                right += 1
            accepted += right
            position += right + 1
        drafter.release(sequence)
    return accepted


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parse(argv)
    if arguments.engine:
        serve_engine(json.loads(arguments.engine))
    else:
        asyncio.run(_compare(arguments))


async def _compare(arguments: argparse.Namespace) -> None:
    if arguments.kind == "renames":
        tasks = rename_tasks(arguments.model, arguments.prompts)
        prompts = [list(task.prompt_token_ids) for task in tasks]
    else:
        read = recordings.read_recordings(recordings.FOLDER / f"{arguments.kind}.npz.xz")
        prompts = [each.prompt_token_ids.tolist() for each in read[: arguments.prompts]]
    with contextlib.ExitStack() as stack:
        drafter = stack.enter_context(running_process("drafter")).address
        client = stack.enter_context(DrafterClient(drafter))
        engines = {name: Engine(name, arguments, drafter) for name in VARIANTS}
        for engine in engines.values():
            stack.callback(engine.stop)
        print("| streams | drafts | tokens/s | over plain | tokens per step |")
        print("|--:|---|--:|--:|--:|")
        for streams in arguments.streams:
            await _measure(engines, prompts, streams, arguments, client)


async def _measure(
    engines: dict[str, Engine],
    prompts: Sequence[Sequence[int]],
    streams: int,
    arguments: argparse.Namespace,
    client: DrafterClient,
) -> None:
    last: dict[str, dict[str, Any]] = {}

    def variant(name: str) -> Variant:
        async def turn() -> float:
            last[name] = result = engines[name].run(prompts, streams)
            return sum(map(len, result["token_ids"])) / float(result["seconds"])

        return Variant(name=name, streams=streams, turn=turn)

    variants = [variant(name) for name in VARIANTS]
    await by_turns(variants, arguments.rounds)
    answers = last["plain"]["token_ids"]
    for each in variants:
        result = last[each.name]
        if result["token_ids"] != answers:
            raise SystemExit(f"{each.name} changes the output at {streams} streams")
        num_tokens = sum(map(len, answers))
        per_step = (num_tokens - len(prompts)) / (num_tokens - len(prompts) - result["accepted"])
        print(
            f"| {streams} | {each.name} | {each.median:.0f} "
            f"| {each.median / variants[0].median:.2f} | {per_step:.2f} |",
            flush=True,
        )
    alone = accepted_alone(client, prompts, answers, arguments.num_draft_tokens)
    if last["tandem"]["accepted"] < alone:
        raise SystemExit(f"vLLM accepts {last['tandem']['accepted']} drafts of {alone}")


def serve_engine(options: dict[str, Any]) -> None:
    """Runs what comes on standard input."""
    from vllm import LLM, SamplingParams

    methods = {
        "plain": None,
        "ngram": {"method": "ngram", **NGRAMS},
        "tandem": {"method": "custom_class", "model": "tandem_vllm.TandemProposer"},
    }
    speculation = methods[options["variant"]]
    if speculation is not None:
        speculation["num_speculative_tokens"] = options["num_draft_tokens"]
    engine = LLM(
        model=options["model"],
        dtype=options["dtype"],
        max_model_len=2048,
        max_num_seqs=options["streams"],
        enable_prefix_caching=False,
        speculative_config=speculation,
        async_scheduling=False,
        disable_log_stats=False,
    )
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)

    def num_accepted() -> int:
        name = "vllm:spec_decode_num_accepted_tokens"
        return sum(each.value for each in engine.get_metrics() if each.name == name)

    for line in sys.stdin:
        order = json.loads(line)
        before, seconds, token_ids = num_accepted(), 0.0, []
        for start in range(0, len(order["prompts"]), order["streams"]):
            batch = order["prompts"][start : start + order["streams"]]
            begun_s = time.monotonic()
            outputs = engine.generate(
                [{"prompt_token_ids": prompt} for prompt in batch], greedy, use_tqdm=False
            )
            seconds += time.monotonic() - begun_s
            token_ids += [list(each.outputs[0].token_ids) for each in outputs]
        accepted = num_accepted() - before
        print(json.dumps({"token_ids": token_ids, "seconds": seconds, "accepted": accepted}))
        sys.stdout.flush()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.vllm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL)
    kinds = ["renames", "edit", "extract", "quote"]
    parser.add_argument("--kind", choices=kinds, default="renames")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--num-draft-tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
