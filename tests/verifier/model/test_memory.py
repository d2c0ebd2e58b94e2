"""K/V gets what is free: within the container's limit on a CPU, beside the largest step on a GPU.

No test here runs on a GPU: `torch.cuda`'s figures are a stand-in's.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from servicekit.config import ConfigError
from tests.verifier.paged_model import make_small_model
from verifier.attention.kv_cache import block_bytes as bytes_of_block
from verifier.batch.batch_layout import BatchLayout
from verifier.batch.host_step import ComputesLogits
from verifier.batch.target_model import BoolArray, FloatArray
from verifier.checkpoint.refusals import CheckpointError
from verifier.config import VerifierConfig
from verifier.gpu.attention.selection import AttentionChoice
from verifier.model import model_part
from verifier.model.gpu_memory import (
    PROFILE_BLOCKS,
    free_for_kv_bytes,
    largest_steps,
)
from verifier.model.memory import (
    MEASURED_FRACTION,
    choose_num_kv_blocks,
    choose_num_state_slots,
    free_memory_bytes,
)
from verifier.model.model_part import ModelPart, room_for_part

MIB = 1 << 20
GPU = torch.device("cuda")
NODE = {"meminfo": "MemTotal: 9999999 kB\nMemAvailable:   1048576 kB\n"}


def free(folder: Path, membership: str, files: dict[str, str], **options: bool) -> int:
    """`free_memory_bytes` where /proc and the control groups have these files."""
    for name, text in {
        "proc/meminfo": NODE["meminfo"],
        "proc/self/cgroup": membership,
        **{f"groups/{name}": text for name, text in files.items()},
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return free_memory_bytes(folder / "proc", folder / "groups", **options)


@pytest.mark.parametrize(
    ("membership", "files", "expected_mib"),
    [
        ("", {}, 1024),
        ("0::/\n", {"memory.max": "max", "memory.current": "5"}, 1024),
        ("0::/\n", {"memory.max": str(300 * MIB), "memory.current": str(100 * MIB)}, 200),
        # Pages of files that were not used lately are given back.
        (
            "0::/\n",
            {
                "memory.max": str(300 * MIB),
                "memory.current": str(100 * MIB),
                "memory.stat": f"anon {60 * MIB}\ninactive_file {40 * MIB}\nactive_file 7\n",
            },
            240,
        ),
        # The limit of a group around this one.
        (
            "0::/pod/main\n",
            {
                "pod/memory.max": str(500 * MIB),
                "pod/memory.current": str(450 * MIB),
                "pod/main/memory.max": str(300 * MIB),
                "pod/main/memory.current": str(100 * MIB),
            },
            50,
        ),
        # In use beyond a limit that was lowered.
        ("0::/\n", {"memory.max": str(MIB), "memory.current": str(2 * MIB)}, 0),
        (
            "4:memory:/pod\n0::/\n",
            {
                "memory/pod/memory.limit_in_bytes": str(300 * MIB),
                "memory/pod/memory.usage_in_bytes": str(100 * MIB),
                "memory/pod/memory.stat": f"inactive_file 9\ntotal_inactive_file {10 * MIB}\n",
            },
            210,
        ),
        # Version 1's "no limit".
        (
            "4:memory:/\n",
            {
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": "100",
            },
            1024,
        ),
    ],
)
def test_the_containers_limit_counts_and_not_the_nodes_memory(
    membership: str, files: dict[str, str], expected_mib: int, tmp_path: Path
) -> None:
    assert free(tmp_path, membership, files) == expected_mib * MIB


def test_blocks_of_the_flag_that_memory_has_no_room_for_are_refused() -> None:
    def choose(num_kv_blocks: int) -> int:
        return choose_num_kv_blocks(
            config_with(num_kv_blocks=num_kv_blocks),
            model_limit=1 << 20,
            block_size=16,
            block_bytes=MIB,
            free_bytes=100 * MIB,
        )

    assert choose(100) == 100
    with pytest.raises(ConfigError, match="--num-kv-blocks: 101 blocks take 101 MiB; 100 MiB are"):
        choose(101)


@pytest.mark.parametrize(
    ("options", "slot_mib", "expected"),
    [
        # Half of a quarter of 800 MiB.
        ({}, 1, 100),
        ({"max_num_seqs": 8}, 1, 24),
        ({"max_num_seqs": 8, "prefix_cache": False}, 1, 8),
        ({"kv_memory_fraction": 0.5}, 40, 5),
        ({}, 100, 1),
    ],
)
def test_slots_of_recurrent_states_take_half_of_the_room_at_most(
    options: dict[str, Any], slot_mib: int, expected: int
) -> None:
    config = config_with(**options)
    free_bytes, slot_bytes = 800 * MIB, slot_mib * MIB
    num_slots = choose_num_state_slots(config, slot_bytes=slot_bytes, free_bytes=free_bytes)
    assert num_slots == expected
    num_blocks = choose_num_kv_blocks(
        config, model_limit=1 << 30, block_size=16, block_bytes=MIB, free_bytes=free_bytes,
        state_bytes=num_slots * slot_bytes,
    )  # fmt: skip
    fraction = options.get("kv_memory_fraction", 0.25)
    assert num_blocks == 800 * fraction - expected * slot_mib
    with pytest.raises(ConfigError, match="no memory for recurrent states, 401 MiB of each"):
        choose_num_state_slots(config_with(), slot_bytes=401 * MIB, free_bytes=free_bytes)


def config_with(**options: Any) -> VerifierConfig:
    return VerifierConfig(model=Path("somewhere"), **options)


@pytest.mark.parametrize(
    ("given", "default", "expected"), [(None, 0.25, 25), (None, 0.9, 90), (0.5, 0.9, 50)]
)
def test_the_flag_comes_before_the_devices_fraction(
    given: float | None, default: float, expected: int
) -> None:
    blocks = choose_num_kv_blocks(
        config_with(kv_memory_fraction=given),
        model_limit=1 << 20,
        block_size=16,
        block_bytes=10,
        free_bytes=1000,
        default_fraction=default,
    )
    assert blocks == expected


@pytest.mark.parametrize("longest", [1, 3, 40, 600, 5000])
@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "max_drafts"),
    [(1, 1, 0), (4, 64, 0), (4, 64, 7), (64, 512, 31), (64, 64, 31)],
)
def test_the_measured_steps_reach_the_flags_limits_and_not_beyond(
    longest: int, max_num_seqs: int, max_num_batched_tokens: int, max_drafts: int
) -> None:
    config = config_with(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_speculative_tokens=max_drafts,
    )
    one, many = largest_steps(config, longest=longest, block_size=16, vocab_size=100)
    assert one.num_tokens == one.num_rows == min(max_num_batched_tokens, longest)
    assert one.seq_lens.tolist() == [longest]
    assert one.positions[-1] == longest - 1
    assert many.num_tokens == many.num_rows <= max_num_batched_tokens
    assert len(many.seq_lens) == min(max_num_seqs, longest)
    assert many.num_draft_tokens.max() <= max_drafts
    assert longest - max_num_seqs < many.seq_lens.sum() <= longest
    for layout in (one, many):
        assert max(block for table in layout.block_tables for block in table) < PROFILE_BLOCKS


class StandInGpu:
    """Stands for `torch.cuda`: a device's memory, and a torch that keeps what it once had."""

    def __init__(self, total: int, weights: int) -> None:
        self.total = total
        self.allocated = self.reserved = self.peak = weights

    def allocate(self, size: int) -> None:
        self.allocated += size
        if self.allocated > self.total:
            raise torch.OutOfMemoryError("out of memory")
        self.reserved = max(self.reserved, self.allocated)
        self.peak = max(self.peak, self.allocated)

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.total - self.reserved, self.total

    def memory_allocated(self, device: torch.device) -> int:
        return self.allocated

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.allocated

    def empty_cache(self) -> None:
        self.reserved = self.allocated


class StandInModel:
    """A model that takes 1000 bytes per token of a step, and 300 for good at its first."""

    vocab_size = 10
    kv_is_finite: BoolArray | None = None
    hidden_states: FloatArray | None = None

    def __init__(self, gpu: StandInGpu) -> None:
        self._gpu = gpu
        self._has_run = False

    def forward(self, layout: BatchLayout) -> FloatArray:
        if not self._has_run:
            self._gpu.allocate(300)
            self._has_run = True
        self._gpu.allocate(1000 * layout.num_tokens)
        self._gpu.allocate(-1000 * layout.num_tokens)
        return torch.zeros(layout.num_rows, self.vocab_size).numpy()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> StandInGpu:
    stand_in = StandInGpu(total=1_000_000, weights=400_000)
    for name in (
        *("mem_get_info", "memory_allocated", "max_memory_allocated"),
        *("reset_peak_memory_stats", "empty_cache"),
    ):
        monkeypatch.setattr(torch.cuda, name, getattr(stand_in, name))
    return stand_in


def free_for_kv(
    gpu: StandInGpu,
    make_model: Callable[[], ComputesLogits] | None = None,
    *,
    block_bytes: int = 64,
    **flags: Any,
) -> int:
    return free_for_kv_bytes(
        config_with(**flags),
        GPU,
        make_model or (lambda: StandInModel(gpu)),
        model_limit=4096,
        block_size=16,
        block_bytes=block_bytes,
        vocab_size=10,
    )


@pytest.mark.stand_in
def test_a_gpu_leaves_what_weights_and_the_largest_step_do_not_take(gpu: StandInGpu) -> None:
    assert free_for_kv(gpu, max_num_batched_tokens=200) == 600_000 - 300 - 200_000
    # With the blocks that this allows, the largest step still fits.
    blocks = choose_num_kv_blocks(
        config_with(max_num_seqs=512, max_num_batched_tokens=512),
        model_limit=4096,
        block_size=16,
        block_bytes=64,
        free_bytes=600_000 - 300 - 200_000,
        default_fraction=MEASURED_FRACTION,
    )
    gpu.allocate(blocks * 64)
    gpu.allocate(200_000)
    assert gpu.total - gpu.allocated < 0.1 * 400_000 + 64


@pytest.mark.stand_in
def test_a_model_whose_step_fails_is_refused_as_a_checkpoint(gpu: StandInGpu) -> None:
    class FailingModel(StandInModel):
        def forward(self, layout: BatchLayout) -> FloatArray:
            raise KeyError("layer_idx")

    with pytest.raises(CheckpointError, match="its largest step fails: 'layer_idx'"):
        free_for_kv(gpu, make_model=lambda: FailingModel(gpu))


@pytest.mark.stand_in
def test_a_largest_step_that_does_not_fit_is_refused_by_its_flag(gpu: StandInGpu) -> None:
    with pytest.raises(ConfigError, match="--max-num-batched-tokens"):
        free_for_kv(gpu, max_num_batched_tokens=700)


@pytest.mark.stand_in
@pytest.mark.parametrize(("num_kv_blocks", "has_ranks"), [(7, False), (None, True), (None, False)])
def test_one_process_on_a_gpu_measures_its_step_and_ranks_take_a_smaller_share(
    gpu: StandInGpu,
    monkeypatch: pytest.MonkeyPatch,
    num_kv_blocks: int | None,
    has_ranks: bool,
) -> None:
    """Ranks would wait for each other within a step, so none is measured there."""
    made: list[int] = []

    def assemble(part: ModelPart, *, num_kv_blocks: int) -> StandInModel:
        made.append(num_kv_blocks)
        return StandInModel(gpu)

    monkeypatch.setattr(model_part, "assemble", assemble)
    checkpoint = make_small_model("llama").checkpoint
    part = ModelPart(
        checkpoint=checkpoint,
        files="",
        device=GPU,
        attention=AttentionChoice(name="sdpa", block_size=16),
    )
    config = config_with(
        max_num_seqs=100,
        max_num_batched_tokens=200,
        num_kv_blocks=num_kv_blocks,
        tensor_parallel_size=2 if has_ranks else 1,
    )
    blocks = room_for_part(config, part)
    num_bytes = bytes_of_block(checkpoint.kv_shape, 16)
    if num_kv_blocks is not None:
        assert (blocks, made) == (7, [])
    elif has_ranks:
        assert (blocks, made) == (600_000 // 4 // num_bytes, [])
    else:
        left_bytes = 600_000 - 300 - 200_000
        assert (blocks, made) == (
            int(left_bytes * MEASURED_FRACTION // num_bytes),
            [PROFILE_BLOCKS],
        )
