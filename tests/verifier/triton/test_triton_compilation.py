"""The `triton` backend's kernels compile for GPUs, by Triton's own compiler; none needs to be here.

tests/gpu/ runs them.
"""

import importlib.util
import itertools
import re
from typing import Any

import pytest
import torch

from tests.verifier.gpu.weight_forms import FORMS
from tests.volume import cases
from verifier.batch.batch_layout import ScheduledTokens, lay_out

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="needs the package triton (extra dev), and it is not installed here",
    ),
]
META = torch.device("meta")
FIRST_THAT_OVERLAPS = 90
"""The first compute capability whose kernels may begin before the one before them has ended."""
UNITS = {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma", 100: "tcgen05.mma"}
"""Instructions of products of 16-bit matrices, by compute capability."""
SMALLEST_SHARED_MEMORY = 99 << 10
"""Bytes that a thread block may have, of all GPUs from compute capability 8.0 on."""


"""Of a multiprocessor, of all these GPUs."""


class Target:
    """Stands in for Triton's driver: a GPU that is compiled for."""

    def __init__(self, capability: int, device: int | None = None) -> None:
        self.capability = capability
        self.device = capability if device is None else device

    def get_current_device(self) -> int:
        return self.device  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


class Compiled:
    """What is compiled instead of launched: kernels by name, and how many different ones."""

    def __init__(self) -> None:
        self.kernels: dict[str, Any] = {}
        self.different: set[int] = set()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, cache: pytest.Cache) -> Compiled:
    """Triton keeps machine code by all that it follows from: a later run compiles what changed."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache.mkdir("triton")))
    compiled = Compiled()
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        # Else the version of Triton would decide on it, and on bits.
        assert "enable_fp_fusion" in options, self.__name__
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        compiled.kernels[self.__name__] = kernel
        compiled.different.add(id(kernel))

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(driver, "_active", None)
    return compiled


def compile_for(capability: int) -> None:
    from triton.runtime import driver

    driver.set_active(Target(capability))


def instructions_of_sums(ptx: str) -> frozenset[str]:
    """Those that add products up, but for how many columns each computes."""
    found = re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma|fma\.rn\.f32)\S*", ptx)
    return frozenset(re.sub(r"(\.m\d+)n\d+(k\d+)", r"\1\2", each) for each in found)


def before_waiting(kernel: Any) -> str:
    """The part of a kernel's code that runs before it waits for the kernel before it."""
    before, *after = re.split(r"griddepcontrol\.wait ?;", kernel.asm["ptx"])
    assert len(after) == 1, f"{len(after)} waits"
    return before


def attend(
    dtype: torch.dtype,
    *,
    head_dim: int,
    longest: int,
    window: int | None,
    num_sequences: int = 2,
    is_strict: bool = False,
    overlaps: bool = False,
) -> None:
    """Compiles what a step needs, for indices that lie as those of a real step."""
    from verifier.attention.backend import device_tables
    from verifier.gpu.attention.tiles import Splitting, tiles_of_step
    from verifier.gpu.attention.triton_paged import paged_attention, write

    layout = lay_out(
        [
            ScheduledTokens(
                token_ids=[1],
                draft_token_ids=[],
                num_computed_tokens=longest - 1,
                block_table=[0] * -(-longest // 16),
            )
        ]
        * num_sequences,
        block_size=16,
    )
    tables = device_tables(layout, torch.device("cpu"))
    queries = torch.empty((32, num_sequences, head_dim), dtype=dtype, device=META)
    keys = torch.empty((8, num_sequences, head_dim), dtype=dtype, device=META)
    blocks = torch.empty((100, 16, 8, head_dim), dtype=dtype, device=META)
    # A copy begins where allocators of a device begin.
    write(keys, keys, torch.from_numpy(layout.slot_mapping).clone(), blocks, blocks)
    paged_attention(
        queries,
        blocks,
        blocks,
        tables,
        tiles=tiles_of_step(queries, is_strict=is_strict),
        scaling=0.1,
        sliding_window=window,
        splitting=Splitting(),
        overlaps=overlaps,
    )


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "window", "longest"),
    [
        (80, torch.float16, 128, None, 9000),
        (80, torch.bfloat16, 256, 100, 100),
        (80, torch.float32, 128, None, 100),
        (89, torch.bfloat16, 80, 100, 9000),
        (90, torch.bfloat16, 128, None, 9000),
        (90, torch.bfloat16, 256, None, 100),
        (100, torch.bfloat16, 128, None, 100),
        (80, torch.float32, 512, None, 9000),
        *((capability, torch.bfloat16, 512, None, 9000) for capability in (80, 90, 100)),
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
    """Of one split, and of several; in large tiles."""
    compile_for(capability)
    attend(
        dtype,
        head_dim=head_dim,
        longest=longest,
        window=window,
        is_strict=True,
        overlaps=capability >= FIRST_THAT_OVERLAPS,
    )
    kernels = compiled.kernels
    assert kernels.keys() == {"write_kv", "attend"} | ({"combine"} if longest > 512 else set())
    assert all(kernel.metadata.shared <= SMALLEST_SHARED_MEMORY for kernel in kernels.values())
    # Block ids are loaded ahead, too, unless that takes too much of shared memory.
    is_wide = dtype is torch.float32 and head_dim > 256
    assert is_wide or re.search(r"local_alloc.*memdesc<\dx\d+xi32", kernels["attend"].asm["ttgir"])
    code = kernels["attend"].asm["ptx"]
    if dtype is not torch.float32:
        # Tiles of wide heads have fewer rows than newer instructions take.
        assert UNITS[80 if head_dim > 256 else capability] in code
        # Folding rounds each product and sum, in every kernel.
        assert not any("fma.rn" in kernel.asm["ptx"] for kernel in kernels.values())


def test_no_later_step_waits_for_the_compiler(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of sequences, their lengths, and where the indices lie; 129 are too many
    for kernels to overlap.
    """
    from triton import knobs
    from triton.runtime import driver

    from verifier.gpu.attention.triton_backend import TritonBackend

    different: set[tuple[str, str]] = set()

    def note(*, key: str, fn: Any, **_: object) -> bool:
        different.add((fn.name, key))
        # By default, none of them is compiled: other tests compile some, and it takes long.
        return cases(True, False)

    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", note)
    # A device of its own, for which no other test has compiled.
    driver.set_active(Target(90, device=1090))
    backend = TritonBackend(device=META, overlaps=True)
    queries = torch.empty((32, 7, 64), dtype=torch.bfloat16, device=META)
    blocks = torch.empty((100, 16, 8, 64), dtype=torch.bfloat16, device=META)
    # The last one's splits grow, as those of no window.
    windows = (None, 1, 4096, 50_000)
    for window in windows:
        for has_softcap in (False, True):
            backend.compile(queries, blocks, blocks, sliding_window=window, has_softcap=has_softcap)
    # The write, too.
    attend(torch.bfloat16, head_dim=64, longest=3, window=None, overlaps=True)
    compiled_before = set(different)
    # Attend by one program and several, with a softcap, combine, each without a window, with a
    # short and a long one, and in small tiles, and in large ones that overlap and do not; write.
    assert len(compiled_before) == 46
    for num_sequences in (1, 2, 3, 4, 5, 16, 17, 129):
        for longest in (1, 16, 300, 1100, 8192):
            for window in windows:
                attend(
                    torch.bfloat16,
                    head_dim=64,
                    longest=longest,
                    window=window,
                    num_sequences=num_sequences,
                    overlaps=True,
                )
    assert different == compiled_before


@pytest.mark.parametrize(
    ("capability", "dtype", "form"),
    cases(
        [
            (80, torch.float32, None),
            (89, torch.float16, None),
            (90, torch.bfloat16, None),
            (100, torch.bfloat16, None),
            (80, torch.float16, "int4"),
            (89, torch.bfloat16, "int4_minima"),
            (90, torch.bfloat16, "int4_long"),
            (100, torch.float16, "int8"),
            (80, torch.bfloat16, "fp8_channel"),
            (90, torch.bfloat16, "fp8_blocks"),
            (100, torch.bfloat16, "mxfp4"),
        ],
        [
            *itertools.product(UNITS, [torch.bfloat16, torch.float16, torch.float32], [None]),
            *itertools.product(UNITS, [torch.bfloat16, torch.float16], FORMS),
        ],
    ),
)
def test_strict_products_compile_and_fit_and_all_use_one_instruction(
    compiled: Compiled, capability: int, dtype: torch.dtype, form: str | None
) -> None:
    """Of each tile, with a bias or without; and no other number of rows compiles.

    Args: form: of a weight in groups; None: a plain one.
    """
    from verifier.gpu.groups import GroupedWeight
    from verifier.gpu.kernels.operations import TritonOperations
    from verifier.gpu.kernels.product import (
        GROUPED_TILES,
        PRODUCT_TILES,
        ROOMY_SHARED_MEMORY,
        SMALLEST_SHARED_MEMORY,
    )

    tiles = GROUPED_TILES if form else PRODUCT_TILES[dtype]
    num_tiles = len(tiles)
    # KiB of a multiprocessor.
    shared_memory = {80: 164, 89: 100, 90: 228, 100: 228}[capability] << 10
    assert shared_memory >= SMALLEST_SHARED_MEMORY
    overlaps = form is not None and capability >= FIRST_THAT_OVERLAPS
    operations = TritonOperations(is_strict=True, shared_memory=shared_memory, overlaps=overlaps)

    def multiply(num_rows: int, num_outputs: int, *, has_bias: bool) -> None:
        rows, weight, bias = (
            torch.empty(size, dtype=dtype, device=META)
            for size in ((num_rows, 4096), (num_outputs, 4096), (num_outputs,))
        )
        if not form:
            operations.linear(rows, weight, bias if has_bias else None)
            return
        grouped = GroupedWeight.empty(FORMS[form], (num_outputs, 4096), device=META)
        operations.grouped_linear(rows, grouped, bias if has_bias else None)

    compile_for(capability)
    units = set()
    most = 0
    for tile in tiles:
        for has_bias in (False, True):
            multiply(tile.up_to, 6144, has_bias=has_bias)
            kernel = compiled.kernels["product_kernel"]
            most = max(most, kernel.metadata.shared)
            sums = instructions_of_sums(kernel.asm["ptx"])
            # Minima of groups are added by another one.
            units.add(frozenset(each for each in sums if not (form and "fma" in each)))
            # Codes and scales are loaded ahead, too, but for exponents of a byte.
            is_ahead = "ld.global" not in kernel.asm["ptx"]
            assert not form or has_bias or is_ahead == (form != "mxfp4")
    assert most <= shared_memory - (1 << 10)
    if shared_memory < ROOMY_SHARED_MEMORY:
        assert most <= SMALLEST_SHARED_MEMORY - (1 << 10)
    [used] = units
    [instruction] = used
    unit = "fma.rn.f32" if dtype is torch.float32 else UNITS[capability]
    assert instruction.startswith(unit)
    assert len(compiled.different) == 2 * num_tiles
    for num_rows in (2, 3, 15, 16, 18, 33, 64, 65, 130, 2048):
        multiply(num_rows, 4096, has_bias=False)
    assert len(compiled.different) == 2 * num_tiles
