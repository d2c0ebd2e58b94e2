"""What steps launch compiles as it is launched: with a step's tensors and numbers, of which Triton
makes constants and alignments. And no later step waits for the compiler. No kernel runs, and no GPU
needs to be here; tests/gpu/ runs them.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.verifier.chunks import Chunk
from tests.verifier.cpu.test_gpt_oss import write_mxfp4
from tests.verifier.cpu.test_loader import save
from tests.verifier.gpu.running_decoder import CPU, RunningGpuDecoder, load
from tests.verifier.paged_model import some_tokens
from tests.verifier.quantized_files import METHODS, write_quantized
from tests.verifier.triton.test_triton_compilation import (
    FIRST_THAT_OVERLAPS,
    META,
    SMALLEST_SHARED_MEMORY,
    Compiled,
    before_waiting,
    compile_for,
    compiled,
)
from verifier.batch.batch_layout import StateUse
from verifier.gpu import fp8
from verifier.gpu.layers import deltas, experts
from verifier.sampling import Sampling

pytest.importorskip("triton")
pytestmark = pytest.mark.slow
__all__ = ["compiled"]

TEXT = some_tokens(60, 97)
OF_EVERY_STEP = {"add_norm_kernel", "rotate_and_store_kernel", "attend", "combine"}
# Of few rows, and those of the logits in FP8, too.
OF_EVERY_STEP |= {"product_kernel"}
THAT_OVERLAP = {*OF_EVERY_STEP, "gate_kernel"}
OF_FP8 = {"quantise_rows_kernel", "rescale_kernel"}
OF_DELTAS = {"delta_kernel", "keep_kernel"}
OF_EXPERTS = {"find_tiles_kernel", "gate_up_kernel", "down_kernel", "add_experts_kernel"}


@pytest.fixture
def launched(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """Tensors of torch's `meta` device stand for those of a GPU."""
    from verifier.gpu.kernels.delta_rule import compute_delta
    from verifier.gpu.kernels.mixture import mix
    from verifier.gpu.kernels.quantisation import quantise_rows, rescale_product

    monkeypatch.setattr(experts, "mixture_for", lambda device: mix)
    monkeypatch.setattr(deltas, "delta_rule_for", lambda device: compute_delta)
    operations = fp8.RowOperations(quantise_rows, rescale_product)
    monkeypatch.setattr(fp8, "row_operations_for", lambda device: operations)
    return compiled


def check(launched: Compiled, names: set[str]) -> None:
    """These kernels are compiled to machine code that fits on every GPU."""
    assert launched.kernels.keys() == names
    assert all(kernel.asm["cubin"] for kernel in launched.kernels.values())
    assert all(k.metadata.shared <= SMALLEST_SHARED_MEMORY for k in launched.kernels.values())


def check_that_programs_wait(launched: Compiled) -> None:
    """Each program, whatever it does then; before that, it reads weights alone."""
    for name, kernel in launched.kernels.items():
        if name not in THAT_OVERLAP:
            assert "griddepcontrol" not in kernel.asm["ptx"]
            continue
        before = before_waiting(kernel)
        assert not re.search(r"\b(ret|bra|atom|red|st|cp)\b", before), name
        assert ("ld.global" in before) == (name == "add_norm_kernel"), name
        assert ("prefetch.global" in before) == (name == "product_kernel"), name


@pytest.mark.parametrize(
    ("name", "capability", "is_strict", "quantization", "kernels"),
    [
        ("qwen3", 90, True, "none", {"gate_kernel"}),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in [
                ("gemma2", 80, False, "none", {"gate_kernel"}),
                # A single head of keys: numbers that are 1 become constants.
                ("phi3_partial", 90, False, "none", {"gate_kernel"}),
                ("llama_biases", 89, False, "fp8", {"gate_kernel", *OF_FP8}),
                ("mixtral", 90, False, "none", OF_EXPERTS),
                ("gemma4", 90, False, "none", {"gate_kernel"}),
                ("gemma4_mixture", 100, True, "none", {"gate_kernel", *OF_EXPERTS}),
                ("qwen3_next", 80, False, "none", {"gate_kernel", *OF_DELTAS, *OF_EXPERTS}),
                ("qwen3_5", 90, True, "none", {"gate_kernel", *OF_DELTAS}),
                ("qwen3_5_moe", 100, True, "none", {"gate_kernel", *OF_DELTAS, *OF_EXPERTS}),
                ("gpt_oss", 100, False, "none", OF_EXPERTS),
                ("olmo2", 80, False, "none", {"gate_kernel"}),
                ("olmo3", 90, True, "none", {"gate_kernel"}),
                ("olmo3", 100, False, "none", {"gate_kernel"}),
                ("mxfp4", 80, False, "none", OF_EXPERTS),
                ("mxfp4", 90, True, "none", OF_EXPERTS),
                ("awq", 90, True, "none", {"gate_kernel"}),
                ("fp8_blocks", 80, False, "none", {"gate_kernel"}),
                ("fp8_blocks", 90, True, "none", OF_EXPERTS),
            ]
        ),
    ],
)
def test_a_decoders_steps_compile(
    name: str,
    capability: int,
    is_strict: bool,
    quantization: str,
    kernels: set[str],
    launched: Compiled,
    tmp_path: Path,
) -> None:
    from verifier.gpu.attention.triton_backend import TritonBackend
    from verifier.gpu.kernels.operations import TritonOperations

    if name == "mxfp4":
        write_mxfp4(tmp_path)
    elif name in METHODS:
        has_experts = kernels == OF_EXPERTS
        write_quantized(tmp_path, name, model_type="qwen3_moe" if has_experts else "llama")
    else:
        save(tmp_path, name, torch.bfloat16)
    compile_for(capability)
    overlaps = capability >= FIRST_THAT_OVERLAPS
    operations = TritonOperations(is_strict=is_strict, overlaps=overlaps)
    weights = load(tmp_path, device=META, operations=operations, quantization=quantization)
    backend = TritonBackend(device=META, overlaps=overlaps)
    running = RunningGpuDecoder(weights, backend=backend, num_state_slots=3)

    def run(*sizes: int) -> None:
        """A step of sequences, with a row of logits for each token."""
        chunks = [
            Chunk(
                token_ids=TEXT[:size],
                start=0,
                block_table=[0, 1, 2, 3],
                num_rows=size,
                state=StateUse(slot) if weights.config.delta else None,
            )
            for slot, size in enumerate(sizes)
        ]
        running.decoder.forward_on_device(running.lay_out(*chunks))

    # More rows than those of kernels that overlap; and of strict products, each tile.
    for sizes in ((50, 50, 50), (50, 50), (40,), (20,), (1,)):
        run(*sizes)
    check(launched, OF_EVERY_STEP | kernels)
    if overlaps:
        check_that_programs_wait(launched)
    else:
        assert not any("griddepcontrol" in k.asm["ptx"] for k in launched.kernels.values())
    num_different = len(launched.different)
    for sizes in ((2,), (1, 1), (16,), (17,), (3, 1, 40), (43, 43, 43)):
        run(*sizes)
    assert len(launched.different) == num_different


def test_a_samplers_steps_compile(launched: Compiled) -> None:
    """Greedy or not, with more rows than are computed at a time, with a grammar and without."""
    from verifier.gpu.sampling.sampler import DeviceSampler, StagedSequence

    vocab_size, num_seqs, num_drafts = 5003, 20, 7
    sampler = DeviceSampler(
        device=CPU,
        vocab_size=vocab_size,
        max_num_seqs=num_seqs,
        max_num_drafts=num_drafts,
    )
    compile_for(90)

    def run(sampling: Sampling, num_sequences: int, *, has_grammar: bool) -> None:
        masks = np.zeros((num_drafts + 1, (vocab_size + 31) // 32), dtype=np.int32)
        slots = [sampler.open(sampling, prompt_length=1) for _ in range(num_sequences)]
        sampler.stage(
            [
                StagedSequence(
                    slot=slot,
                    token_ids=[1, 2],
                    draft_token_ids=[3] * num_drafts,
                    first_position=2,
                    allowed=masks if has_grammar else None,
                )
                for slot in slots
            ]
        )
        num_rows = num_sequences * (num_drafts + 1)
        sampler.run(torch.zeros(num_rows, vocab_size, dtype=torch.bfloat16))
        sampler.result()
        for slot in slots:
            sampler.close(slot)

    run(Sampling(temperature=1.0), 1, has_grammar=False)
    kernels = {"adjust_rows", "weigh_rows", "cut_rows", "race_rows", "decide"}
    check(launched, kernels)
    for num_sequences in (1, 2, 20):
        for sampling in (Sampling(), Sampling(temperature=0.7, top_k=1, top_p=0.5)):
            run(sampling, num_sequences, has_grammar=num_sequences == 2)
    assert len(launched.different) == len(kernels)
