"""The restriction of torch's libraries to some kernels; its effect: `test_strict_numerics.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verifier.model.cpu_kernels import hold_cpu_kernels

ROOT = Path(__file__).parents[2]

PRODUCTS = """
import os, torch
from verifier.model.cpu_kernels import hold_cpu_kernels
hold_cpu_kernels(os.environ)
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(1)
for dtype in (torch.float32, torch.bfloat16):
    weight = torch.randn(768, 192, generator=generator).to(dtype)
    rows = torch.randn(512, 192, generator=generator).to(dtype)
    whole = torch.nn.functional.linear(rows, weight)
    for count in (8, 16, 32, 64, 128, 256):
        part = torch.nn.functional.linear(rows[:count], weight)
        assert torch.equal(part, whole[:count]), (dtype, count)
"""

LOADED = """
import sys
from servicekit.config import ServerOptions
from verifier.build import load_model
from verifier.config import VerifierConfig
config = VerifierConfig(
    server=ServerOptions(listen="127.0.0.1:0"), model=sys.argv[1], numerics="strict", device="cpu",
    dtype="float32", threads=1, num_kv_blocks=16,
)
assert load_model(config).served.numerics_digest, "the check at load found other bits"
"""


def run(program: str, *arguments: str) -> None:
    """Runs a program without any of the variables set."""
    held = ("MKL_CBWR", "ONEDNN_MAX_CPU_ISA")
    environ = {name: value for name, value in os.environ.items() if name not in held}
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, cwd=ROOT, env=environ)


def test_products_of_few_and_many_rows_are_equal_to_the_bit() -> None:
    run(PRODUCTS)


@pytest.mark.slow
def test_a_verifier_restricts_kernels_before_it_computes() -> None:
    run(LOADED, str(ROOT / "examples/demo_model/model"))


@pytest.mark.parametrize(
    ("vendor", "mkl"), [("GenuineIntel", "AUTO,STRICT"), ("AuthenticAMD", None)]
)
def test_mkl_is_restricted_on_processors_that_need_it(vendor: str, mkl: str | None) -> None:
    environ: dict[str, str] = {}
    hold_cpu_kernels(environ, {"vendor_id": vendor})
    assert environ.get("MKL_CBWR") == mkl


def test_variables_that_the_operator_has_set_are_kept() -> None:
    environ = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    hold_cpu_kernels(environ, {})
    assert environ == {"ONEDNN_MAX_CPU_ISA": "AVX2"}
