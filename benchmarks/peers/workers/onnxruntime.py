"""onnxruntime-genai as a peer: its generator, in right-padded batches, and with its n-gram drafts.

Runs in the peer's own environment. Its model builder needs torch and transformers, which are read
from the environment of the benchmark, for the conversion only and in a process of its own.
"""

import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.protocol import (
    Generate,
    Options,
    Request,
    eos_token_id,
    lookup_tokens,
    serve,
)

# Installed in the environment of this peer only.
genai: Any = importlib.import_module("onnxruntime_genai")

NGRAM = 3
# Runs the builder with its own packages before those of the benchmark's environment.
_BUILD = """
import json, runpy, sys
builder, rest, sys.argv = sys.argv[1], json.loads(sys.argv[2]), ["builder", *sys.argv[3:]]
sys.path[0] = builder.rpartition("/")[0]
sys.path += rest
runpy.run_path(builder, run_name="__main__")
"""


class BuilderError(Exception):
    """The model builder failed; the message is the end of what it printed."""


def start(options: Options) -> Generate:
    folder = options.converted / "onnxruntime"
    if not (folder / "genai_config.json").exists():
        _convert(options, folder)
    config = genai.Config(str(folder))
    session = {"intra_op_num_threads": options.threads, "inter_op_num_threads": 1}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
    model = genai.Model(config)
    end = eos_token_id(options.model)

    def generate(mode: str, requests: Sequence[Request], streams: int) -> list[list[int]]:
        outputs: list[list[int]] = []
        for first in range(0, len(requests), streams):
            batch = requests[first : first + streams]
            outputs += _generate(model, batch, end, lookup_tokens(mode))
        return outputs

    return generate


def _generate(model: Any, batch: Sequence[Request], end: int, num_drafts: int) -> list[list[int]]:
    width = max(len(request.prompt) for request in batch)
    limit = width + max(request.max_new_tokens for request in batch)
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(do_sample=False, max_length=limit, batch_size=len(batch))
    if num_drafts:
        parameters.set_speculative_options(max_draft_tokens=num_drafts, ngram_size=NGRAM)
    generator = genai.Generator(model, parameters)
    rows = [request.prompt + [end] * (width - len(request.prompt)) for request in batch]
    generator.append_tokens(np.array(rows, np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    outputs = []
    for index, request in enumerate(batch):
        # The end token itself is not in it.
        output = [*generator.get_sequence(index)[width:].tolist(), end]
        outputs.append(output[: min(output.index(end) + 1, request.max_new_tokens)])
    return outputs


def _convert(options: Options, folder: Path) -> None:
    package = Path(genai.__file__).parent
    partial = folder.with_name("onnxruntime.partial")
    built = subprocess.run(
        [
            *(sys.executable, "-c", _BUILD),
            *(str(package / "models" / "builder.py"), json.dumps(options.project_paths)),
            *("-m", str(options.model), "-i", str(options.model), "-o", str(partial)),
            *("-p", "fp32", "-e", "cpu"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if built.returncode:
        raise BuilderError(built.stdout[-1000:])
    partial.rename(folder)


if __name__ == "__main__":
    serve(start)
