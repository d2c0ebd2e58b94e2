"""The `triton` backend's kernels compile for GPUs, by Triton's own compiler; none needs to be here.

tests/gpu/ runs them.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from verifier.attention.block_table import StepTables

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs the package triton (extra dev), and it is not installed here",
)
META = torch.device("meta")
SMALLEST_SHARED_MEMORY = 99 << 10
"""Bytes that a thread block may have, of all GPUs from compute capability 8.0 on."""


class Target:
    """Stands in for Triton's driver: a GPU that is compiled for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


class Compiled(dict[str, Any]):
    """Kernels by name, instead of launched."""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiled:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = Compiled()
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernels[self.__name__] = run(self, *arguments, grid=grid, warmup=True, **options)

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(driver, "_active", None)
    return kernels


def compile_for(
    capability: int, dtype: torch.dtype, *, head_dim: int, longest: int, window: int | None
) -> None:
    from triton.runtime import driver

    from verifier.attention.triton_paged import Splitting, paged_attention, write

    driver.set_active(Target(capability))

    def indices(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=META)

    tables = StepTables(
        cu_seqlens_q=indices(3),
        cu_seqlens_k=indices(3),
        seq_lens=indices(2),
        block_table=indices(2, 40),
        longest_q=4,
        longest_k=longest,
    )
    queries = torch.empty((32, 8, head_dim), dtype=dtype, device=META)
    keys = torch.empty((8, 8, head_dim), dtype=dtype, device=META)
    blocks = torch.empty((100, 16, 8, head_dim), dtype=dtype, device=META)
    write(keys, keys, torch.empty(8, dtype=torch.int64, device=META), blocks, blocks)
    paged_attention(
        queries,
        blocks,
        blocks,
        tables,
        scaling=0.1,
        sliding_window=window,
        splitting=Splitting(),
    )


@pytest.mark.parametrize("longest", [100, 9000])
@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "window"),
    [
        (80, torch.float16, 128, None),
        (80, torch.bfloat16, 256, 100),
        (80, torch.float32, 128, None),
        (89, torch.bfloat16, 80, 100),
        (90, torch.bfloat16, 128, None),
        (100, torch.bfloat16, 128, None),
    ],
)
def test_kernels_compile_and_fit(
    compiled: Compiled,
    capability: int,
    dtype: torch.dtype,
    head_dim: int,
    window: int | None,
    longest: int,
) -> None:
    """Of one split, and of several."""
    compile_for(capability, dtype, head_dim=head_dim, longest=longest, window=window)
    assert compiled.keys() == {"write_kv", "attend"} | ({"combine"} if longest > 512 else set())
    assert all(kernel.metadata.shared <= SMALLEST_SHARED_MEMORY for kernel in compiled.values())
    code = compiled["attend"].asm["ptx"]
    if dtype is not torch.float32:
        unit = {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma", 100: "tcgen05.mma"}[capability]
        assert unit in code
        # Folding rounds each product and sum, in every kernel.
        assert not any("fma.rn" in kernel.asm["ptx"] for kernel in compiled.values())
