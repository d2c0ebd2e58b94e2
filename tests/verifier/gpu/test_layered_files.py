"""Gemma 4 and OLMo 3 from GGUF files by the decoder for GPUs; on a CPU, in plain torch."""

from pathlib import Path

import pytest

from servicekit.gguf.folder import model_folder
from tests.verifier.cpu.test_layered_files import ARCHITECTURES, vocabularies, write
from tests.verifier.gpu.running_decoder import RunningGpuDecoder, load
from tests.verifier.gpu.test_decoder import assert_near, transformers_logits
from tests.verifier.paged_model import some_tokens

__all__ = ["vocabularies"]
TEXT = some_tokens(40, 97)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    weights = load(model_folder(write(tmp_path, name)), "float32")
    rows = RunningGpuDecoder(weights).run_in_chunks(TEXT, [21, 1, 5], list(range(8)))
    assert_near(rows, transformers_logits(tmp_path / "saved", TEXT))
