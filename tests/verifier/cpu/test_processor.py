"""Bits do not depend on the tiles that suit a processor."""

import os
import platform
import subprocess
import sys

import pytest

from tests.verifier.cpu.logits_digest import MODELS, digest
from verifier.cpu.processor import AVX2, AVX512, NEON, unsupported_reason


@pytest.mark.skipif(platform.machine() != "x86_64", reason="code for AVX2")
def test_avx2_gives_the_bits_of_this_processors_own_tiles() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.verifier.cpu.logits_digest"],
        env={**os.environ, "NUMBA_CPU_NAME": "x86-64-v3"},
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    tiles, *lines = result.stdout.splitlines()
    assert tiles == "avx2"
    assert lines == [f"{name} {dtype} {digest(name, dtype)}" for name, dtype in MODELS]


def test_the_tiles_sums_fit_in_the_registers() -> None:
    """With a broadcast input and the weights of one tile's blocks beside them."""
    for tiles, num_registers, lanes in ((AVX512, 32, 16), (AVX2, 16, 8), (NEON, 32, 4)):
        for rows in range(1, tiles.max_rows + 1):
            registers_per_sum = 16 // lanes
            num_sums = rows * tiles.num_blocks(rows) * registers_per_sum
            assert num_sums < num_registers, (tiles.name, rows)


def test_this_processor_is_supported() -> None:
    assert unsupported_reason() is None
