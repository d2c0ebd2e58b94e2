"""Checks of a decoder with strict operations, on a GPU or in Triton's interpreter.

The reference is one pass over the whole text. Run in the interpreter by
`test_in_the_interpreter.py`, on a GPU by `tests/gpu/test_strict.py`.
"""

import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.verifier.chunks import Chunk
from tests.verifier.cpu.test_loader import save
from tests.verifier.gpu.running_decoder import RunningGpuDecoder, load
from tests.verifier.gpu.test_decoder import transformers_logits
from tests.verifier.paged_model import some_tokens
from tests.verifier.quantized_files import METHODS, write_quantized
from tests.verifier.triton.triton_interpreter import interpreted_cases
from verifier.gpu.attention.tiles import Splitting
from verifier.gpu.attention.triton_backend import TritonBackend
from verifier.gpu.kernels.delta_rule import compute_delta
from verifier.gpu.kernels.mixture import mix
from verifier.gpu.kernels.operations import TritonOperations
from verifier.gpu.kernels.overlapping_kernels import can_overlap
from verifier.gpu.layers import deltas, experts
from verifier.gpu.weights import GpuWeights

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
# numpy, which computes in the interpreter, warns of infinities; a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SUBJECTS = [(name, torch.float32) for name in ("gemma2", "gpt_oss", "olmo3")]
SUBJECTS.append(("awq", torch.float16))
if HAS_GPU:
    names = ["llama_biases", "mistral", "qwen3", "gemma2", "gemma3", "phi3", "mixtral", "qwen3_moe"]
    names += ["gpt_oss", "gemma4", "gemma4_mixture", "olmo2", "olmo3"]
    SUBJECTS += [(name, dtype) for name in names for dtype in (torch.bfloat16, torch.float16)]
    SUBJECTS += [(name, torch.bfloat16) for name in ("awq", "gptq_int4", "fp8_blocks")]
NUM_TOKENS = 90 if HAS_GPU else 22
TEXT = some_tokens(NUM_TOKENS, 97)
BLOCKS = list(range(64))
# Shorter than the text, so that attention adds up several.
SPLITTING = Splitting(split_tokens=16, equal_splits=2)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    """On a CPU, too, whose tensors would not get them."""
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_GPU:
            patch.setattr(experts, "mixture_for", lambda device: mix)
            patch.setattr(deltas, "delta_rule_for", lambda device: compute_delta)
        yield


@dataclass(frozen=True)
class Subject:
    """A model, and the logits [T, V] of `TEXT` in one pass."""

    weights: GpuWeights
    logits: torch.Tensor

    def running(self) -> RunningGpuDecoder:
        return running(self.weights)


def running(weights: GpuWeights) -> RunningGpuDecoder:
    backend = TritonBackend(device=DEVICE, splitting=SPLITTING, is_strict=True)
    return RunningGpuDecoder(weights, backend=backend, num_blocks=128)


@pytest.fixture(scope="module", params=SUBJECTS, ids=str)
def subject(request: pytest.FixtureRequest) -> Subject:
    name, dtype = request.param
    with tempfile.TemporaryDirectory() as folder:
        if name in METHODS:
            write_quantized(Path(folder), name)
        else:
            # Of the interpreter's two layers, one has a window or experts, the other has not.
            save(Path(folder), name, dtype, is_smaller=not HAS_GPU)
        operations = TritonOperations(is_strict=True, overlaps=can_overlap(DEVICE))
        weights = load(Path(folder), str(dtype).removeprefix("torch."), DEVICE, operations)
        logits = running(weights).run_in_chunks(TEXT, [NUM_TOKENS], BLOCKS)
        if dtype is torch.float32:
            exact = transformers_logits(Path(folder), TEXT)
            largest = max(1.0, exact.abs().max().item())
            torch.testing.assert_close(logits, exact, rtol=0, atol=1e-4 * largest)
    # What could not differ would show nothing.
    assert len(logits.unique(dim=0)) > NUM_TOKENS // 2
    return Subject(weights, logits)


@pytest.mark.parametrize("name", ["gemma4", "qwen3_next"])
def test_logits_are_transformers_ones(name: str, tmp_path: Path) -> None:
    """Of families whose layers differ; in chunks."""
    save(tmp_path, name)
    weights = load(tmp_path, "float32", DEVICE, TritonOperations(is_strict=True))
    text = TEXT[:6]
    logits = running(weights).run_in_chunks(text, [3, 1, 2], BLOCKS)
    exact = transformers_logits(tmp_path, text)
    largest = max(1.0, exact.abs().max().item())
    torch.testing.assert_close(logits, exact, rtol=0, atol=1e-4 * largest)


def chunk(start: int, end: int, blocks: list[int], num_rows: int | None = None) -> Chunk:
    rows = end - start if num_rows is None else num_rows
    return Chunk(token_ids=TEXT[start:end], start=start, block_table=blocks, num_rows=rows)


@pytest.mark.parametrize("sizes", interpreted_cases([[17, 1, 1]], [[17, 1, 1], [5, 2]]))
def test_bits_do_not_depend_on_chunks(subject: Subject, sizes: list[int]) -> None:
    rows = subject.running().run_in_chunks(TEXT, sizes, BLOCKS[::-1])
    assert torch.equal(rows, subject.logits)


@pytest.mark.parametrize("is_expanded", [False, True])
def test_bits_do_not_depend_on_drafts(subject: Subject, is_expanded: bool) -> None:
    """Wrong drafts, which are dropped; then right ones."""
    decoder = subject.running()
    decoder.run(chunk(0, 4, BLOCKS, 1))
    for start in (4, 13):
        wrong = [TEXT[start], *((token + 1) % 97 for token in TEXT[start + 1 : start + 6])]
        tried = Chunk(token_ids=wrong, start=start, block_table=BLOCKS, num_rows=6)
        [rows] = decoder.run(tried, is_expanded=is_expanded)
        assert torch.equal(rows[0], subject.logits[start])
        end = start + 9
        [rows] = decoder.run(chunk(start, end, BLOCKS), is_expanded=is_expanded)
        assert torch.equal(rows, subject.logits[start:end])


@pytest.mark.parametrize("num_sequences", [2, 7, 33] if HAS_GPU else [4])
def test_bits_do_not_depend_on_the_batch(subject: Subject, num_sequences: int) -> None:
    """Decodes, drafts and chunks at any place of the text; few rows that need logits, or many."""
    decoder = subject.running()
    draw = random.Random(num_sequences)
    decoder.run(chunk(0, NUM_TOKENS, BLOCKS, 1))
    for _ in range(interpreted_cases(1, 2)):
        chunks = []
        for _ in range(num_sequences):
            start = draw.randrange(NUM_TOKENS - 1)
            size = min(draw.choice([1, 1, 6, 18]), NUM_TOKENS - start)
            chunks.append(chunk(start, start + size, BLOCKS, draw.choice([1, size])))
        for each, rows in zip(chunks, decoder.run(*chunks), strict=True):
            assert torch.equal(rows, subject.logits[each.end - len(rows) : each.end])
