"""Which shapes of tiles suit this processor's registers. Bits do not depend on them."""

import platform
from dataclasses import dataclass
from typing import Any

import llvmlite.binding
import numba

# Sets numba's target to a level of x86-64, before it is read here.
import servicekit.kernels.jit  # noqa: F401


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of a processor's kernels.

    Attributes:
        blocks: `blocks[r - 1]`: how many blocks of 16 outputs a tile of r rows has: so many that
            all sums stay in registers, and that enough chains hide the latency of an addition.
        max_group_rows: rows of a tile of weights in groups.
        group_outputs: how many of a block's outputs such a tile computes at a time.
        fuses_products: whether one instruction multiplies 16-bit integers and adds.
    """

    name: str
    blocks: tuple[int, ...]
    max_group_rows: int
    group_outputs: int = 16
    fuses_products: bool = False

    @property
    def vectors(self) -> str:
        """The kind of registers: "avx512", "avx2" or "neon"."""
        return self.name.removesuffix("vnni")

    @property
    def max_rows(self) -> int:
        return len(self.blocks)

    def num_blocks(self, rows: int) -> int:
        return self.blocks[rows - 1]


# Kernels take constants from here.

# 32 registers of 16 floats.
AVX512 = Tiles("avx512", (8, 8, 4, 4, 4, 4, 2, 2, 2, 2, 2, 2), 8)
VNNI = Tiles("avx512vnni", AVX512.blocks, 8, fuses_products=True)
# 16 registers of 8 floats.
AVX2 = Tiles("avx2", (4, 2, 1, 1, 1, 1), 4, group_outputs=8)
# 32 registers of 4 floats. By reading only: it has not run.
NEON = Tiles("neon", (4, 2, 2, 1, 1, 1), 4)


def unsupported_reason() -> str | None:
    """Why this processor cannot run the kernels; None: it can.

    Without instructions for fused multiply-adds, each would be a call into a library.
    """
    if platform.machine() in ("aarch64", "arm64"):
        return None
    features = llvmlite.binding.get_host_cpu_features()
    missing = [name for name in ("fma", "avx2", "f16c") if not features.get(name, False)]
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"there are no kernels for {platform.machine()}"
    return f"the processor has no {', '.join(missing)}" if missing else None


def _choose() -> Tiles:
    if platform.machine() in ("aarch64", "arm64"):
        return NEON
    config: Any = numba.config
    if config.CPU_NAME != "x86-64-v4":
        return AVX2
    return VNNI if "+avx512vnni" in (config.CPU_FEATURES or "") else AVX512


TILES = _choose()
