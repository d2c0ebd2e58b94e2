"""What the numerics digest covers, and when it is empty."""

from typing import Any

import pytest

from tests.verifier.conftest import MODEL_FOLDER
from verifier.build import load_model
from verifier.config import VerifierConfig


def digest_of_loaded(**options: Any) -> str:
    config = VerifierConfig(
        model=MODEL_FOLDER, device="cpu", threads=1, num_kv_blocks=32, **options
    )
    return load_model(config).served.numerics_digest


@pytest.mark.parametrize("options", [{"numerics": "fast"}, {"acceptance_rule": "ratio"}])
def test_is_empty_where_output_depends_on_the_batch_or_the_drafts(options: dict[str, Any]) -> None:
    assert digest_of_loaded(**options) == ""


def test_of_the_own_decoder_depends_on_types_alone() -> None:
    first = digest_of_loaded(dtype="bfloat16")
    assert first
    assert digest_of_loaded(dtype="bfloat16", max_num_seqs=3, block_size=32) == first
    others = [digest_of_loaded(dtype="float32"), digest_of_loaded(quantization="int8")]
    assert len({first, *others}) == 3
    config = VerifierConfig(model=MODEL_FOLDER, device="cpu", threads=2, num_kv_blocks=40)
    assert load_model(config).served.numerics_digest == first
