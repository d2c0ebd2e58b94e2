"""The machine of a figure. bfloat16 may be fast on one processor and emulated on another, so a
speed needs the processor's instructions beside it.
"""

import os
import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")

# Features by which torch, oneDNN and numba choose kernels.
_FEATURES = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_int8", "amx_bf16", "asimd", "bf16", "sve"),
)


def processor(cpuinfo: Path = _CPUINFO) -> str:
    """The processor's name, the cores available to this process, and the vector instructions."""
    name, flags = platform.processor() or platform.machine(), ""
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip().lower() in ("flags", "features"):
                flags = value
    present = set(flags.split())
    features = [feature for feature in _FEATURES if feature in present]
    cores = len(os.sched_getaffinity(0))
    return f"{name}, {cores} cores, {' '.join(features) or 'vector instructions unknown'}"
