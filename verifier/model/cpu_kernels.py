"""Which kernels torch's libraries may pick on a CPU while numerics are `strict`.

The padding rules of `numerics.py` make products of one row and of many the same to the bit where
the libraries sum in one order. Two of their choices break that, found by trial (torch 2.13, Xeon
with AMX):

- oneDNN multiplies bfloat16 by AMX from some shape on, in another order than without it. It is
  held to AVX-512.
- MKL on Intel's processors splits the sums of float32 products by their number of rows. Its
  conditional numerical reproducibility, STRICT, ends that. Elsewhere MKL is left alone: it did not
  do so on AMD's, where that mode may cost speed.

The libraries read their variables once, when they compute for the first time, so they must be set
before. Where it was too late, the check at load finds out and the verifier's `numerics_digest` is
empty.
"""

from collections.abc import Mapping, MutableMapping
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def hold_cpu_kernels(
    environ: MutableMapping[str, str], processor: Mapping[str, str] | None = None
) -> None:
    """Sets the variables that are not set yet.

    Args:
        environ: `os.environ`.
        processor: as `cpu_lines` describes it; None: this one.
    """
    processor = cpu_lines() if processor is None else processor
    environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    if processor.get("vendor_id") == "GenuineIntel":
        environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def cpu_lines(path: Path = _CPUINFO) -> dict[str, str]:
    """The first processor's description, by key; empty where there is none."""
    if not path.exists():
        return {}
    first = path.read_text().partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
