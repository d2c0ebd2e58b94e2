"""No layout makes a kernel leave an array: see `guarded_decoder.py`."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("name", "dtype", "quantization", "num_threads"),
    [
        ("bundled", "bfloat16", "none", 1),
        ("qwen3_moe_step", "float32", "none", 3),
        ("qwen3_moe", "float32", "int8", 2),
        ("mixtral", "bfloat16", "fp8", 1),
        ("gemma3_linear", "float16", "none", 2),
        ("phi3_partial", "bfloat16", "none", 2),
        ("llama_biases", "float32", "int8", 1),
    ],
)
def test_full_steps_stay_within_their_arrays(
    name: str, dtype: str, quantization: str, num_threads: int
) -> None:
    """A process of its own: what leaves an array ends it."""
    result = subprocess.run(
        [
            sys.executable, "-X", "faulthandler", "-m", "tests.verifier.cpu.guarded_decoder", name,
            dtype, quantization, str(num_threads), "9",
        ],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert int(result.stdout.split()[0]) > 50
