"""Bits do not depend on the processor: each level of x86-64 has tiles and machine code of its own.

`python -m tests.verifier.cpu.test_levels FOLDER` prints this process's tiles, and digests of logits
and of tokens sampled from them. The models are in the folder.
"""

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import llvmlite.binding
import numpy as np
import pytest

from servicekit.kernels.jit import LEVELS, MACHINES
from servicekit.logs import configure_logs
from tests.verifier.cpu.running_decoder import MODEL_FOLDER, RunningDecoder, load, save, some_tokens
from verifier.cpu.processor import TILES
from verifier.sampling.logits_processing import History
from verifier.sampling.parameters import Sampling
from verifier.sampling.rejection_sampler import JudgedSequence, verify

REPOSITORY = Path(__file__).parents[3]
SUBJECTS = [
    ("bundled", "float32"),
    ("gemma2", "float32"),
    ("mixtral", "float32"),
    ("bundled", "bfloat16"),
    ("gemma4", "bfloat16"),
    ("phi3_partial", "bfloat16"),
    ("gguf_llama", "auto"),
    ("packed_int4_zeros", "auto"),
    ("packed_int8", "auto"),
    ("fp8_blocks", "auto"),
    ("olmo3", "bfloat16"),
    ("qwen3_next", "bfloat16"),
    ("gguf_gpt-oss", "auto"),
]
NUM_TOKENS = 300


def digests(folder: Path) -> Iterator[str]:
    """Of each subject's logits, and of the tokens sampled from them."""
    sampling = Sampling(temperature=1.0, top_p=0.95, seed=3)
    history = History.of(sampling, prompt_token_ids=[], output_token_ids=[])
    for name, dtype in SUBJECTS:
        weights = load(folder / name, dtype)
        token_ids = some_tokens(NUM_TOKENS, weights.vocab_size)
        with RunningDecoder(weights) as running:
            logits = running.run_in_chunks(token_ids, [7, 1, 120], list(range(20)))
        verdict = verify(
            logits,
            [
                JudgedSequence(sampling=sampling, history=history, first_position=position)
                for position in range(NUM_TOKENS)
            ],
            draft_token_ids=np.zeros(0, dtype=np.int64),
            num_draft_tokens=np.zeros(NUM_TOKENS, dtype=np.int64),
        )
        for array in (logits, verdict.output_token_ids):
            yield hashlib.sha256(array.tobytes()).hexdigest()


@pytest.mark.long
def test_levels_of_x86_64_give_the_same_bits(tmp_path: Path) -> None:
    if platform.machine() not in MACHINES:
        pytest.skip("there are levels of x86-64 only")
    has = llvmlite.binding.get_host_cpu_features()
    levels = [level for level in LEVELS if all(map(has.get, level.required))]
    if len(levels) < 2:
        pytest.skip("this processor has no AVX-512")
    (tmp_path / "bundled").symlink_to(MODEL_FOLDER)
    for name in {name for name, _ in SUBJECTS} - {"bundled"}:
        (tmp_path / name).mkdir(exist_ok=True)
        save(tmp_path / name, name)
    outputs = [
        subprocess.run(
            [sys.executable, "-m", "tests.verifier.cpu.test_levels", str(tmp_path)],
            cwd=REPOSITORY,
            env={**os.environ, **level.environment},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for level in levels
    ]
    assert len({tiles for tiles, *_ in outputs}) == len(levels)
    (_, *first), *others = outputs
    assert len(set(first)) == 2 * len(SUBJECTS)
    for _, *other in others:
        assert other == first


if __name__ == "__main__":
    configure_logs("info", "tests")
    print(TILES.name, *digests(Path(sys.argv[1])))
