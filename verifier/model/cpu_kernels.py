"""Restricts the kernels of torch's libraries on a CPU while numerics are `strict`.

The padding rules of `numerics.py` give products of one row and of many the same bits if the
libraries sum in one order. Two of their choices, found by trial (torch 2.13, Xeon with AMX), do
not:

- oneDNN multiplies larger bfloat16 shapes by AMX, in another order than without it. It is
  restricted to AVX-512.
- MKL on Intel's processors splits the sums of float32 products by their number of rows. Its
  conditional numerical reproducibility, STRICT, prevents that. On AMD's processors MKL did not
  split, and that mode may cost speed, so it is not set there.

The libraries read their variables once, at their first computation, so the variables must be set
before. If they are set too late, the check at load notices, and the verifier's `numerics_digest` is
empty.
"""

from collections.abc import Mapping, MutableMapping
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def hold_cpu_kernels(
    environ: MutableMapping[str, str], processor: Mapping[str, str] | None = None
) -> None:
    """Sets those of the variables that are not set.

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
