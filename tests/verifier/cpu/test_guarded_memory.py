"""No layout makes a kernel leave an array: see `guarded_decoder.py`."""

import subprocess
import sys
from pathlib import Path

from tests.verifier.cpu.running_decoder import MODEL_FOLDER
from tests.verifier.cpu.test_loader import save
from tests.verifier.quantized_files import METHODS, write_quantized

SUBJECTS = [
    "bundled:bfloat16:none:1",
    "gemma3_linear:float16:none:2",
    "gemma4:bfloat16:none:2",
    "gemma4_mixture:float32:none:3",
    "phi3_partial:bfloat16:none:2",
    "llama_biases:bfloat16:fp8:1",
    "qwen3_moe_step:float32:none:3",
    "qwen3_moe:bfloat16:fp8:2",
    "mixtral:bfloat16:fp8:1",
    "qwen3_next:bfloat16:none:2",
    "qwen3_5:float32:none:3",
    "packed_int4_zeros:bfloat16:none:2",
    "fp8_blocks:bfloat16:none:1",
]


def test_full_steps_stay_within_their_arrays(tmp_path: Path) -> None:
    """A process of its own: what leaves an array ends it. It need not import transformers."""
    (tmp_path / "bundled").symlink_to(MODEL_FOLDER)
    for name in {subject.partition(":")[0] for subject in SUBJECTS} - {"bundled"}:
        if name in METHODS:
            write_quantized(tmp_path / name, name)
        else:
            save(tmp_path / name, name)
    result = subprocess.run(
        [
            sys.executable, "-X", "faulthandler", "-m", "tests.verifier.cpu.guarded_decoder",
            *(f"{tmp_path}/{subject}" for subject in SUBJECTS),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    counts = [int(line.split()[0]) for line in result.stdout.splitlines()]
    assert len(counts) == len(SUBJECTS)
    assert min(counts) > 50
