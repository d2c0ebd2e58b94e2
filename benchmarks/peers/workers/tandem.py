"""Tandem's engine in process, with the drafter's kernel and without RPC."""

import atexit
import contextlib
from collections.abc import Sequence

from benchmarks.in_process import InProcessEngine
from benchmarks.peers.protocol import SPECULATION, Generate, Options, Request, serve
from benchmarks.workloads import Task
from verifier.config import VerifierConfig
from verifier.engine.messages import Decided


def start(options: Options) -> Generate:
    config = VerifierConfig.model_validate(
        {
            "model": options.model,
            "device": "cpu",
            "dtype": options.dtype,
            "threads": options.threads,
            "prefix_cache": False,
        }
    )
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    engine = stack.enter_context(InProcessEngine(config).started())

    def generate(mode: str, requests: Sequence[Request], streams: int) -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in requests]

        def observe(decided: Decided) -> None:
            outputs[int(decided.sequence_id)] += decided.token_ids

        tasks = [
            Task(prompt_token_ids=request.prompt, max_new_tokens=request.max_new_tokens)
            for request in requests
        ]
        engine.run(
            tasks,
            streams=min(streams, len(tasks)),
            speculate=mode == SPECULATION,
            observe=observe,
        )
        return outputs

    return generate


if __name__ == "__main__":
    serve(start)
