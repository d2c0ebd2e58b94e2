"""Recurrent states of the decoder for GPUs, on a CPU in plain torch: logits are transformers' ones
whatever was accepted, kept and begun with again.
"""

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from servicekit.gguf.folder import model_folder
from tests.verifier.chunks import Chunk
from tests.verifier.cpu.state_walk import NUM_SLOTS, Walk
from tests.verifier.cpu.test_delta_files import plain_configs, write
from tests.verifier.gpu.graph_stand_in import RecordingCapture
from tests.verifier.gpu.running_decoder import CPU, RunningGpuDecoder, load
from tests.verifier.gpu.tables_attention import TablesBackend
from tests.verifier.gpu.test_decoder import assert_near, folder_of, transformers_logits
from tests.verifier.paged_model import some_tokens
from tests.volume import cases
from verifier.batch.batch_layout import StateUse
from verifier.config import VerifierConfig
from verifier.gpu.decoder import Graphs
from verifier.gpu.graph_pool import GraphLimits
from verifier.gpu.layers.states import slot_bytes
from verifier.model.gpu_model import find_on_gpu, load_on_gpu

__all__ = ["plain_configs"]

TEXT = some_tokens(150, 97)


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("name", cases(["qwen3_next"], ["qwen3_next", "qwen3_5", "qwen3_5_moe"]))
def test_any_steps_give_the_logits_of_the_text(name: str, has_graphs: bool) -> None:
    """Alone and beside others; in steps of any size and in padded ones, which graphs compute."""
    weights = load(folder_of(name))
    expected = transformers_logits(folder_of(name), TEXT)
    graphs = None
    if has_graphs:
        limits = GraphLimits(buckets=(8, 32, 64), max_bytes=1 << 30, max_prepare_s=60.0)
        graphs = Graphs(capture=RecordingCapture(), limits=limits)
    running = RunningGpuDecoder(
        weights,
        backend=TablesBackend(1e30) if has_graphs else None,
        graphs=graphs,
        max_num_tokens=64,
        num_state_slots=NUM_SLOTS,
        max_drafts=5,
    )
    if has_graphs:
        running.decoder.warm_up()
    walk = Walk(
        TEXT, random.Random(7), vocab_size=97, max_num_tokens=64, max_drafts=5, num_blocks=60
    )
    for step in walk.steps(cases(25, 200)):
        results = running.run(*(chunk for chunk, _ in step))
        for (chunk, num_right), rows in zip(step, results, strict=True):
            first = chunk.end - chunk.num_rows
            assert_near(rows[:num_right], expected[first : first + num_right])


def test_a_text_that_is_not_finite_harms_no_other() -> None:
    """Not in its slot later, either."""
    weights = load(folder_of("qwen3_5"))
    text = [token % 96 for token in TEXT[:20]]
    embeddings = weights.embeddings.clone()
    embeddings[96] = torch.nan
    broken = dataclasses.replace(weights, embeddings=embeddings, head=weights.head.clone())
    running = RunningGpuDecoder(broken, num_state_slots=2)

    def chunk(tokens: list[int], slot: int, num_rows: int = 3) -> Chunk:
        table = [2 * slot, 2 * slot + 1]
        return Chunk(token_ids=tokens, start=0, block_table=table, num_rows=num_rows,
                     state=StateUse(slot))  # fmt: skip

    (alone,) = running.run(chunk(text, 1))
    _, sound = running.run(chunk([*text[:7], 96, *text[8:]], 0), chunk(text, 1))
    assert_near(sound, alone)
    assert running.decoder.kv_is_finite is not None
    assert running.decoder.kv_is_finite.tolist() == [True] * 7 + [False] * 13 + [True] * 20
    # A draft that is not finite and was not accepted leaves nothing.
    running.run(chunk([*text[:9], 96], 0, 2))
    rest = Chunk(token_ids=text[9:], start=9, block_table=[0, 1], num_rows=3, state=StateUse(0))
    (after,) = running.run(rest)
    assert_near(after, alone)


def test_a_layout_that_contradicts_its_states_is_refused() -> None:
    running = RunningGpuDecoder(load(folder_of("qwen3_5")), num_state_slots=2)
    with pytest.raises(ValueError, match="goes on at token 4"):
        running.run(Chunk(token_ids=TEXT[:3], start=4, block_table=[0], state=StateUse(1)))


@pytest.mark.usefixtures("plain_configs")
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_logits_of_a_gguf_file_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    """Value heads share key heads by turns in one of them."""
    weights = load(model_folder(write(tmp_path, name)), "float32")
    rows = RunningGpuDecoder(weights).run_in_chunks(TEXT[:30], [17, 1, 4], list(range(8)))
    assert_near(rows, transformers_logits(tmp_path / "saved", TEXT[:30]))


def test_a_loaded_model_tells_its_slots() -> None:
    """It passes the check; there are slots for all sequences, and two snapshots of each."""
    folder = folder_of("qwen3_5")
    config = VerifierConfig(
        model=folder, device="cpu", num_kv_blocks=8, max_num_seqs=3, max_num_speculative_tokens=4
    )
    described = find_on_gpu(config, CPU)
    assert described is not None
    ready = load_on_gpu(config, described, CPU)
    assert ready.num_state_slots == 9
    # Three layers; four value heads, 16 * 96 each; of 2 + 4 rows, 2 * 4 * 16 + 4 * 96 + 8 numbers.
    own_bytes = slot_bytes(described.config, 4, torch.float32)
    assert own_bytes == 3 * 4 * (4 * 16 * 96 + 6 * (128 + 384 + 8))
