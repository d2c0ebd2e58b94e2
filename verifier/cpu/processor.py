"""Which shapes of tiles suit this processor's registers. Bits do not depend on them."""

import os
from dataclasses import dataclass

import numba


@dataclass(frozen=True, slots=True)
class Tiles:
    """`blocks[r - 1]`: how many blocks of 16 outputs a tile of r rows has."""

    name: str
    blocks: tuple[int, ...]

    @property
    def max_rows(self) -> int:
        return len(self.blocks)

    def num_blocks(self, rows: int) -> int:
        return self.blocks[rows - 1]


# 32 registers of 16 floats: at most 24 sums, and enough chains to hide the latency of an addition.
AVX512 = Tiles("avx512", (8, 8, 4, 4, 4, 4, 2, 2, 2, 2, 2, 2))
# 16 registers of 8 floats: at most 6 sums of 16 floats.
AVX2 = Tiles("avx2", (4, 2, 2, 1, 1, 1))

TILES = AVX2 if os.environ.get("T") == "avx2" else AVX512
